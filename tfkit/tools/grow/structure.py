"""Growth of the structure: more layers, and components of a different kind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from tfkit.component import AttentionConfig, Layers
from tfkit.graph.expand import Graph
from tfkit.nn import Linear, StackedLinear
from tfkit.tools.grow.axes import AxisFactor, axis_of, plain_axis
from tfkit.tools.grow.rules import COPIES, MEAN, SizeChange, SizedModel, TensorMap, grown_maps


def old_layers(old: Layers, new: Layers) -> list[tuple[int, bool]] | None:
    """Return for each layer of a deeper stack its layer in the old stack, and whether it is new.

    The old layers are spread evenly and keep their order. A layer and its old layer have the same variant. Return None
    if the variants do not allow it.
    """
    n, period = len(old.layers), old.period or 1
    names, old_names = [layer.name for layer in new.layers], [layer.name for layer in old.layers]
    for size in (period, 1):
        if n % size or len(names) % size:
            continue
        spread = [
            block * (len(names) // size) // (n // size) * size + rest
            for block in range(n // size)
            for rest in range(size)
        ]
        positions = spread if [names[at] for at in spread] == old_names else _first_positions(old_names, names)
        if positions is not None:
            return [*_copied_layers(positions, names, old_names)]
    return None


def _first_positions(old: Sequence[str], new: Sequence[str]) -> list[int] | None:
    """Return increasing positions of the names of the old layers among the names of the new layers."""
    positions, start = [], 0
    for name in old:
        if name not in new[start:]:
            return None
        positions.append(new.index(name, start))
        start = positions[-1] + 1
    return positions


def _copied_layers(
    positions: Sequence[int], names: Sequence[str], old_names: Sequence[str]
) -> Iterator[tuple[int, bool]]:
    originals = {position: layer for layer, position in enumerate(positions)}
    for number, name in enumerate(names):
        if number in originals:
            yield originals[number], False
            continue
        twins = [layer for layer, old_name in enumerate(old_names) if old_name == name]
        yield min(twins, key=lambda layer: (positions[layer] > number, abs(positions[layer] - number))), True


def deeper_maps(old: SizedModel, new: SizedModel) -> dict[str, TensorMap] | None:
    """Return the map of each weight of a deeper model: a new layer copies an old layer, and adds nothing."""
    graphs: list[Graph] = [sized.model.meta["graph"] for sized in (old, new)]
    maps = {}
    copies: dict[str, list[tuple[int, bool]]] = {}
    for node in graphs[1].nodes:
        before = graphs[0].node(node.name).stack
        if node.stack is None or before is None or len(node.stack.layers) == len(before.layers):
            continue
        layers = old_layers(before, node.stack)
        if layers is None or node.stack.repeated:
            return None
        copies[node.name] = layers
    for name, shape in new.shapes.items():
        source, is_new, is_silent = _old_name(name, new, copies)
        if old.shapes.get(source) != shape:
            return None
        maps[name] = TensorMap(source, tuple(map(plain_axis, shape)), is_zero=is_silent, new_gradient=is_new)
    return maps


def _old_name(name: str, new: SizedModel, copies: Mapping[str, Sequence[tuple[int, bool]]]) -> tuple[str, bool, bool]:
    """Return the weight that a weight copies, whether its layer is new, and whether it must be zero in a new layer."""
    node, _, inside = name.partition(".")
    if node not in copies or not inside.startswith("layers."):
        return name, False, False
    _, number, rest = inside.split(".", 2)
    layer, is_new = copies[node][int(number)]
    owner = new.model.get_submodule(new.locations[name].parameter.rpartition(".")[0])
    # A norm of zeros adds its bias.
    writes = isinstance(owner, Linear | StackedLinear) and owner.residual
    after = rest.split(".")[0].endswith("_norm_out") and rest.endswith(".bias")
    return f"{node}.layers.{layer}.{rest}", is_new, is_new and (writes or after)


# ---- components of a different kind ----


def replaced_maps(old: SizedModel, new: SizedModel, slots: Collection[str]) -> dict[str, TensorMap]:
    """Return the map of each weight of a model in which the components in some slots have different kinds.

    Weights of equal names are taken, also into each layer of a stack, such as each expert. Heads of keys and values are
    repeated or averaged. The remaining weights keep their initial values.
    """
    maps = {}
    for name, shape in new.shapes.items():
        source = name if name in old.shapes else _twin(name, old, slots)
        before = old.shapes.get(source or "")
        if source is None or before is None:
            maps[name] = TensorMap(None, tuple(map(plain_axis, shape)))
        elif before == shape:
            maps[name] = TensorMap(source, tuple(map(plain_axis, shape)))
        elif before == shape[1:]:
            copies = axis_of(AxisFactor(1, shape[0]))
            maps[name] = TensorMap(source, (copies, *map(plain_axis, before)), inserted=1, new_gradient=True)
        else:
            maps[name] = _resized(name, source, old, new) or TensorMap(None, tuple(map(plain_axis, shape)))
    return maps


def _twin(name: str, old: SizedModel, slots: Collection[str]) -> str | None:
    """Return the weight with the same last names in the old components of a layer."""
    segments = name.split(".")
    number = next((number for number, segment in enumerate(segments) if segment in slots), None)
    if number is None:
        return None
    around = ".".join(segments[:number])
    starts = tuple(f"{around}.{slot}." for slot in slots)
    twins = [other for other in old.shapes if other.startswith(starts) and other.split(".")[-2:] == segments[-2:]]
    return twins[0] if len(twins) == 1 else None


def _resized(name: str, source: str, old: SizedModel, new: SizedModel) -> TensorMap | None:
    """Return the map of a weight of key-value heads whose number changes."""
    heads, new_heads = (
        next((config.kv_heads for config in sized.configs(key) if isinstance(config, AttentionConfig)), 0)
        for sized, key in ((old, source), (new, name))
    )
    if heads == new_heads or not heads or not new_heads or len(old.shapes[source]) != len(new.shapes[name]):
        return None
    sizes = {name: SizeChange(heads, new_heads)}
    before, after = replace(old, shapes={name: old.shapes[source]}), replace(new, shapes={name: new.shapes[name]})
    for rule in (MEAN, COPIES):
        maps = grown_maps(before, after, rule, sizes)
        if maps is not None:
            return replace(maps[name], source=source)
    return None

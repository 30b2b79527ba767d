"""A property of trained weights: each tensor is where it was trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from tfkit.checkpoint.weight_map import places
from tfkit.component import AttentionConfig, Layer, Step
from tfkit.tools.check.measure import DoesNotApplyError, Measured, property_of
from tfkit.tools.check.profiles import LAYERS, Edit, Parts, Profile, Trace, misplaced
from tfkit.tools.check.subject import Subject


@property_of("places", "has its tensors in the places of their training")
def in_places(subject: Subject) -> Iterator[Measured]:
    """No tensor is transposed, or exchanged for another, as far as the traces of training tell."""
    if subject.weights is None:
        raise DoesNotApplyError("the weights are random")
    tensors = {name: place.view(subject.model.state_dict()) for name, place in places(subject.model).items()}
    speaking = 0
    for node in subject.graph.nodes:
        for layers, traces in _alike(node.name, node.stack.layers if node.stack else (), tensors):
            placement = misplaced([*layers.values()], traces)
            speaking += placement.speaking
            if placement.edits:
                paths = [*layers]
                detail = ", or ".join(_in_words(edit, paths) for edit in placement.edits)
                where = paths[placement.edits[0].first[0]]
                yield Measured.fault(f"{detail}: undone, its units have the sizes of training again", where)
    if not speaking:
        raise DoesNotApplyError(f"training shows in no {LAYERS} layers that are alike")
    yield Measured(0.0, "")


def _alike(
    node: str, layers: Sequence[Layer], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[dict[str, Parts], tuple[Trace, ...]]]:
    """Yield the layers of a stack that have equal traces and shapes, by their paths, and these traces."""
    groups: dict[Any, dict[str, Parts]] = {}
    for number, layer in enumerate(layers):
        path = f"{node}.layers.{number}"
        layer_tensors = {
            name.removeprefix(f"{path}."): item for name, item in tensors.items() if name.startswith(f"{path}.")
        }
        traces = tuple(
            item for step in layer.steps for item in _traces(step) if layer_tensors.keys() >= {item.first, item.second}
        )
        offsets = dict(_offsets(layer))
        names = dict.fromkeys(name for item in traces for name in (item.first, item.second))
        parts = {name: Profile.of(layer_tensors[name] + offsets.get(name, 0)) for name in names}
        groups.setdefault((traces, tuple(item.shape for item in parts.values())), {})[path] = parts
    for (traces, _), group in groups.items():
        yield group, traces


def _traces(step: Step) -> Iterator[Trace]:
    """Yield the traces of a sublayer, if its tensors have the names of tfkit's components."""
    norm, path = f"{_norm_of(step)}.weight", step.name
    if isinstance(step.config, AttentionConfig):
        q, k, v, o = (f"{path}.{name}.weight" for name in ("project.q", "project.k", "project.v", "output"))
        group = step.config.n_heads // step.config.kv_heads, step.config.head_width
        yield Trace(q, k, ("rows", "rows"), group)
        yield Trace(o, v, ("columns", "rows"), group)
        readers = [q] if step.reads_memory else [q, k, v]
    else:
        gate, up, down = (f"{path}.{name}.weight" for name in ("gate", "up", "down"))
        readers = [gate, up]
        yield from (Trace(name, down, ("rows", "columns")) for name in readers)
        yield Trace(gate, up, None)
    yield from (Trace(norm, name, ("rows", "columns"), stream=True) for name in readers)


def _norm_of(step: Step) -> str:
    """Return the module of the norm that a sublayer reads."""
    return "input_norm" if step.reads_input else f"{step.name}_norm_in"


def _offsets(layer: Layer) -> Iterator[tuple[str, float]]:
    """Yield the number that each norm adds to its weight."""
    for step in layer.steps:
        config = layer.input_norm if step.reads_input else step.norm_in
        yield f"{_norm_of(step)}.weight", dict(config or ()).get("offset", 0)


def _in_words(edit: Edit, layers: Sequence[str]) -> str:
    first, second = (f"`{layers[number]}.{name}`" for number, name in (edit.first, edit.second))
    return f"{first} is transposed" if first == second else f"{first} and {second} are exchanged"

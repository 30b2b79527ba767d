"""The spec of a larger model, and the steps that lead to it: each step changes values with one reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, replace
from typing import Any

from tfkit.component import (
    AttentionConfig,
    Component,
    Config,
    FieldPath,
    SharedMarker,
    leaf_values,
    marker,
    parts,
    with_values,
)
from tfkit.errors import Diagnostic, Invalid, SpecError, closest_name, listing, quoted
from tfkit.graph.expand import Graph, expand
from tfkit.plugin.manager import Plugins
from tfkit.spec.load import Spec, take_spec
from tfkit.spec.merge import Change, change_of
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.render import Data, spec_data
from tfkit.spec.source import plain_data
from tfkit.spec.tree import Mapping

WIDTH = "d_model"
"""The name of the width of the residual stream."""
DEPTH = "n_layers"
CHANGE = "change"
"""The name of an argument in errors."""
HEAD_WIDTH = "d_head"
NODE_DEPTH = 3
"""The length of the path of a field of a node: `graph`, the node and the field."""
GRAPH = "graph"


@dataclass(frozen=True)
class SizeStep:
    """A change of the spec with one reason: values, or components, by their paths in the spec."""

    title: str
    values: MappingABC[FieldPath, Any]
    replaces: bool = False
    """True if components have different kinds."""

    @property
    def field(self) -> str:
        """The name of the field of the first value."""
        return next(iter(self.values))[-1]


def larger_spec(graph: Graph, changes: Iterable[str], plugins: Plugins) -> Spec:
    """Return the resolved spec of a model with some values changed, each as `PATH=VALUE`.

    A change of `decoder.d_model` also changes each `d_model` inside the decoder that has the same value, because the
    resolved spec has no inherited values. Raises SpecError.
    """
    data = spec_data(graph.spec.portable)
    data.pop("parameters", None)
    nodes = data[GRAPH]
    parsed = [change_of(text, name=CHANGE) for text in changes]
    for change in parsed:
        path = tuple(key for key, _ in change.steps)
        path = path[1:] if path[0] == GRAPH else path
        value, targets = plain_data(change.value), [*_targets(nodes, path)]
        old = [target[path[-1]] for target in targets]
        for target in [target for target in targets if target[path[-1]] == old[0]]:
            target[path[-1]] = _with_inherited(value, target[path[-1]], plugins)
        if not targets and not _set_defaults(graph, nodes, path, value):
            raise _unknown_path(graph, path, change)
    try:
        spec = take_spec(data, plugins)
    except SpecError as error:
        raise SpecError(*dict.fromkeys(_at_change(item, parsed) for item in error.diagnostics)) from error
    model = _without_narrower_heads(graph.spec, spec)
    return replace(spec, model=model, family=graph.spec.family, file=graph.spec.file)


def _at_change(diagnostic: Diagnostic, changes: Sequence[Change]) -> Diagnostic:
    """Return an error of the larger spec at the change that causes it. A change of `d_model` causes several."""
    keys = diagnostic.path.split(".")
    for change in changes:
        name, _ = change.steps[-1]
        if name in keys:
            node = change.value
            for key in keys[keys.index(name) + 1 :]:
                node = node.items.get(key, node) if isinstance(node, Mapping) else node
            return replace(diagnostic, span=node.span, path="")
    return diagnostic


def _targets(data: Data, path: tuple[str, ...]) -> Iterator[dict[str, Data]]:
    """Yield the mappings with a value at a path, or with a value of the same name below it."""
    for key in path[:-1]:
        data = data.get(key) if isinstance(data, dict) else None
    pending = [data]
    while pending:
        part = pending.pop(0)
        if isinstance(part, dict):
            if path[-1] in part:
                yield part
            pending += [item for key, item in part.items() if key != path[-1]]


def _with_inherited(value: Data, old: Data, plugins: Plugins) -> Data:
    """Return a new component with the values that it would inherit, if both components have them."""
    if not isinstance(value, dict) or not isinstance(old, dict):
        return value
    registry, kind = plugins.registry, str(value.get("kind", ""))
    matches = [registered for slot in registry.slots_of(kind) if (registered := registry.find(slot, kind))]
    fields = {name: info for registered in matches for name, info in registered.config.model_fields.items()}
    shared = {name for name, info in fields.items() if marker(info, SharedMarker)}
    return {**{name: item for name, item in old.items() if name in shared}, **value}


def _without_narrower_heads(old: Spec, new: Spec) -> ModelSpec:
    """Keep the width of heads if their number grows and the width is a default, which would be smaller."""
    before = dict(parts((), old.model))
    widths = {
        (*path, HEAD_WIDTH): config.head_width
        for path, part in parts((), new.model)
        if isinstance(part, AttentionConfig) and dict(part).get(HEAD_WIDTH, 0) is None
        if isinstance(config := before.get(path), AttentionConfig) and part.head_width < config.head_width
    }
    return with_values(new.model, widths)


def _set_defaults(graph: Graph, data: Data, path: tuple[str, ...], value: Data) -> bool:
    """Set a value that the text of the spec omits because it is a default; return True if there is such a field."""
    is_set = False
    for inside, part in parts((), graph.spec.model.graph):
        if isinstance(part, Config) and path[-1] in type(part).model_fields and inside[: len(path) - 1] == path[:-1]:
            target: Any = data
            for key in inside:
                child = target.get(key) if isinstance(target, dict) else None
                if isinstance(child, str) and isinstance(target, dict):
                    child = target[key] = {"kind": child}  # the word stands for a mapping
                target = child
            if isinstance(target, dict):  # the changes of a layer variant need not have the component
                target[path[-1]], is_set = value, True
    return is_set


def _unknown_path(graph: Graph, path: tuple[str, ...], change: Change) -> SpecError:
    names = {leaf[-1] for leaf, value in leaf_values(graph.spec.model.graph) if isinstance(value, int)}
    near = closest_name(path[-1], sorted(names))
    return SpecError(
        Diagnostic(
            f"`{graph.name}` has no value {quoted('.'.join(path))}",
            change.steps[-1][1],
            notes=(f"nodes: {listing(graph.spec.model.graph)}",),
            help=f"a similar name exists: `{near}`" if near else None,
        )
    )


# ---- steps ----


@dataclass(frozen=True)
class SpecDifference:
    """A value, or a component of a different kind, that differs between two specs."""

    path: FieldPath
    old: Any
    new: Any
    owner: str
    """The class of the config with the value."""

    @property
    def is_size(self) -> bool:
        """True if both values are integers."""
        return type(self.old) is int and type(self.new) is int


def step_groups(old: ModelSpec, new: ModelSpec) -> list[list[SizeStep]]:
    """Return the steps from a model to a larger model. The steps of a group may have to be taken together.

    The width of the stream comes first, then other sizes by component, the depth, components of a new kind, and the
    values that are not sizes.
    """
    sizes: dict[tuple[int, str], dict[str, list[SpecDifference]]] = {}
    for difference in _differences(old.graph, new.graph, (GRAPH,), ""):
        name, rank, owner = difference.path[-1], 5, ".".join(difference.path)
        if isinstance(difference.new, Config) or isinstance(difference.old, Config):
            rank, owner = 4, ".".join(difference.path[:-1])
        elif difference.is_size:
            rank = {WIDTH: 1, DEPTH: 3}.get(name, 2)
            # The nodes of a graph must agree about a size of their own, such as a vocabulary.
            owner = difference.owner if rank == 2 and len(difference.path) > NODE_DEPTH else name
        sizes.setdefault((rank, owner), {}).setdefault(name, []).append(difference)
    groups = sorted(sizes.items(), key=lambda item: item[0][0])  # stable: in the order of the spec
    return [[_step(differences) for differences in fields.values()] for _, fields in groups]


def _differences(old: Any, new: Any, path: FieldPath, owner: str) -> Iterator[SpecDifference]:
    before, after = _entries(old), _entries(new)
    if type(old) is type(new) and before is not None and after is not None and before.keys() == after.keys():
        inside = type(new).__name__ if isinstance(new, Config) else owner
        for name in after:
            yield from _differences(before[name], after[name], (*path, name), inside)
    elif old != new or type(old) is not type(new):
        widths = [entries[WIDTH] for entries in (before, after) if entries is not None and WIDTH in entries]
        if len(set(widths)) > 1:  # the component grows before it is replaced
            yield SpecDifference((*path, WIDTH), widths[0], widths[1], owner)
        yield SpecDifference(path, old, new, owner)


def _entries(value: Any) -> MappingABC[str, Any] | None:
    if isinstance(value, Config):
        return dict(value)
    if isinstance(value, tuple) and any(isinstance(item, Config) for item in value):
        return {str(index): item for index, item in enumerate(value)}
    return value if isinstance(value, MappingABC) else None


def _step(differences: Sequence[SpecDifference]) -> SizeStep:
    changes = dict.fromkeys(f"{_text(item.old)} -> {_text(item.new)}" for item in differences)
    first = differences[0].path[1:]
    name = ".".join(first) if len(differences) == 1 else first[-1]
    replaces = any(isinstance(value, Config) for item in differences for value in (item.old, item.new))
    return SizeStep(f"{name} {', '.join(changes)}", {item.path: item.new for item in differences}, replaces)


def _text(value: Any) -> str:
    if isinstance(value, Component):
        return value.kind_name() if value.word_key == "kind" else type(value).__name__
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def with_head_widths(spec: Spec) -> Spec:
    """Return the spec with the width of every head as a number instead of the default, which depends on other sizes."""
    widths = {
        (*path, HEAD_WIDTH): part.head_width
        for path, part in parts((), spec.model)
        if isinstance(part, AttentionConfig) and dict(part).get(HEAD_WIDTH, 0) is None
    }
    model = spec.model.model_copy(update={"parameters": None})  # the number of parameters that the spec states
    return replace(spec, model=with_values(model, widths))


def without_head_widths(spec: Spec) -> Spec:
    """Return the spec without widths of heads that equal the default."""
    model = spec.model
    for path, part in parts((), spec.model):
        if isinstance(part, AttentionConfig) and dict(part).get(HEAD_WIDTH) is not None:
            try:
                shorter = with_values(model, {(*path, HEAD_WIDTH): None})
            except ValueError:  # the number of heads does not divide `d_model`
                continue
            widths = [
                item.head_width
                for other, item in parts((), shorter)
                if other == path and isinstance(item, AttentionConfig)
            ]
            model = shorter if widths == [part.head_width] else model
    return replace(spec, model=model)


def changed(spec: Spec, values: MappingABC[FieldPath, Any]) -> Graph | None:
    """Return the graph of a spec with some values replaced; None if a component rejects them."""
    try:
        return expand(with_values_of(spec, values))
    except (Invalid, SpecError, ValueError):
        return None


def with_values_of(spec: Spec, values: MappingABC[FieldPath, Any]) -> Spec:
    """Return a spec with some values replaced. Raises as `with_values`."""
    return replace(spec, model=with_values(spec.model, values))

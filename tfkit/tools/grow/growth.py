"""The growth of a model step by step, each with a rule and its proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from torch import Tensor

from tfkit.building.builder import build
from tfkit.component import AttentionConfig, Config, FieldPath, NormConfig, Scale, leaf_values, parts
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph, Node, expand
from tfkit.graph.wiring import heads_of_tables
from tfkit.plugin.manager import Plugins
from tfkit.tools.grow.axes import NestedGrowth, is_repeated, plain_axis
from tfkit.tools.grow.changes import (
    DEPTH,
    WIDTH,
    SizeStep,
    changed,
    larger_spec,
    step_groups,
    with_head_widths,
    without_head_widths,
)
from tfkit.tools.grow.mapping import shortest_patterns, weights_entry
from tfkit.tools.grow.proof import EXACT, GrowthProof, initial_model
from tfkit.tools.grow.rules import COPIES, RULES, SizedModel, TensorMap, grown_maps, repeated_maps, sizes_of
from tfkit.tools.grow.structure import deeper_maps, replaced_maps

Maps = Mapping[str, TensorMap]


@dataclass(frozen=True)
class GrowthStep:
    """A step of a growth: its change of the spec, its rule, and what the rule changes.

    Attributes:
        change: the change of the spec, such as `d_model 64 -> 128`.
        rule: the rule that gives the new weights.
        difference: the largest difference of the outputs before and after the step, relative to the largest output.
        exact: true if the step does not change the function, up to rounding in float64.
    """

    change: str
    rule: str
    difference: float
    exact: bool


@dataclass(frozen=True)
class GrownStart:
    """A larger model: its graph, the steps that lead to it, and the `weights` of a run that starts from it."""

    graph: Graph
    steps: tuple[GrowthStep, ...]
    weights: Mapping[str, Any]
    difference: float
    """The largest difference of the outputs of both models, relative to the largest output."""
    repeated: tuple[str, ...] = ()
    """The weights with repeated values, which get equal gradients."""
    states: tuple[str, ...] = ()
    """Patterns of the weights whose state of the optimizer can grow."""
    n_states: int = 0
    """The number of these weights."""
    n_weights: int = 0
    """The number of all weights."""

    @property
    def exact(self) -> bool:
        """True if both models compute the same function, up to rounding in float64."""
        return self.difference <= EXACT


@dataclass(frozen=True)
class _Candidate:
    """A possible result of a step."""

    rule: str
    maps: Maps
    graph: Graph


def grow(
    graph: Graph,
    changes: Iterable[str],
    plugins: Plugins,
    *,
    seed: int = 0,
    length: int | None = None,
    on_step: Callable[[str], None] = lambda text: None,
) -> GrownStart:
    """Return the growth of a model by changes of its spec, `PATH=VALUE`.

    `seed` decides the initial values of new weights, and the inputs of the proof, sequences of `length`. `on_step` is
    called with each change before its proof. Raises SpecError if the larger spec is invalid, or if no rule applies to a
    change.
    """
    target = expand(with_head_widths(larger_spec(graph, changes, plugins)))
    start = expand(with_head_widths(graph.spec))
    groups = step_groups(start.spec.model, target.spec.model)
    if not groups:
        raise SpecError(Diagnostic("the larger model must differ from the model; got no change"))
    proof = GrowthProof.of(graph, seed=seed, length=length)
    state = _State(proof, start, _identity(SizedModel.of(build(start, device="meta"))), seed, on_step)
    steps = [step for group in groups for step in state.take(group)]
    final = replace(expand(without_head_widths(state.graph.spec)), hooks=graph.hooks)
    difference = proof.difference(proof.outputs, state.outputs)
    repeated = tuple(name for name, entry in state.maps.items() if any(map(is_repeated, entry.axes)))
    grown = [name for name, entry in state.maps.items() if entry.keeps_gradient]
    patterns = shortest_patterns(grown, state.maps.keys() - grown)
    weights = state.weights(state.maps)
    counts = len(grown), len(state.maps)
    return GrownStart(final, tuple(steps), weights, difference, repeated, patterns, *counts)


def _identity(sized: SizedModel) -> Maps:
    return {name: TensorMap(name, tuple(map(plain_axis, shape))) for name, shape in sized.shapes.items()}


class _State:
    """The model after some steps."""

    def __init__(self, proof: GrowthProof, graph: Graph, maps: Maps, seed: int, on_step: Callable[[str], None]) -> None:
        self.proof = proof
        self.graph = graph
        self.maps = maps
        self.seed = seed
        self.on_step = on_step
        self.outputs = proof.outputs

    def weights(self, maps: Maps) -> dict[str, Any]:
        return weights_entry(maps, list(SizedModel.of(self.proof.model).shapes))

    def take(self, group: Sequence[SizeStep]) -> Iterator[GrowthStep]:
        """Take the steps of a group one after the other; together if a component rejects one of them alone."""
        steps = self._joined_steps(group)
        while steps:
            step = steps.pop(0)
            larger = changed(self.graph.spec, step.values)
            if larger is not None:
                yield self._step(step, larger)
            elif steps:
                steps[0] = _joined(step, steps[0])
            else:
                raise SpecError(_no_rule(step, self._changes(step)))

    def _joined_steps(self, group: Sequence[SizeStep]) -> list[SizeStep]:
        """Join values without an effect on shapes, such as the experts of a token, to the first step with one."""
        graphs = [changed(self.graph.spec, step.values) for step in group]
        sized = [
            step for step, graph in zip(group, graphs, strict=True) if graph is None or self._changes_shapes(graph)
        ]
        if group[0].replaces:  # a mixer in the place of an attention takes its weights
            moves = any(value is None for step in group for value in step.values.values())
            return [reduce(_joined, group)] if moves else list(group)
        if not sized:
            return list(group)
        for step in group:
            if step not in sized:
                sized[0] = _joined(sized[0], step)
        return sized

    def _changes_shapes(self, larger: Graph) -> bool:
        old, new = (SizedModel.of(build(graph, device="meta")) for graph in (self.graph, larger))
        return old.shapes != new.shapes

    def _step(self, step: SizeStep, larger: Graph) -> GrowthStep:
        self.on_step(step.title)
        is_nested = False
        best: tuple[float, _Candidate, Maps, Sequence[Tensor]] | None = None
        for candidate in self._candidates(step, larger):
            try:
                maps = {
                    name: entry if entry.source is None else self.maps[entry.source].then(entry)
                    for name, entry in candidate.maps.items()
                }
                weights = self.weights(maps)
            except NestedGrowth:
                is_nested = True
                continue
            model = initial_model(candidate.graph, seed=self.seed)
            self.proof.fill(model, weights)
            outputs = self.proof.outputs_of(model)
            del model  # before the next is built
            difference = self.proof.difference(self.outputs, outputs)
            if best is None or difference < best[0]:
                best = difference, candidate, maps, outputs
            if difference <= EXACT:
                break
        if best is None:
            raise SpecError(_no_rule(step, self._changes(step), is_nested=is_nested))
        difference, candidate, self.maps, self.outputs = best
        self.graph = candidate.graph
        return GrowthStep(step.title, candidate.rule, difference, difference <= EXACT)

    def _candidates(self, step: SizeStep, larger: Graph) -> Iterator[_Candidate]:
        """Yield the possible results of a step, the preferred first."""
        old, new = (SizedModel.of(build(graph, device="meta")) for graph in (self.graph, larger))
        if old.shapes == new.shapes:
            yield _Candidate("no weight changes", _identity(new), larger)
            return
        if step.replaces:
            maps = replaced_maps(old, new, {path[-1] for path in step.values})
            yield _Candidate("weights of equal names", maps, larger)
        elif step.field == DEPTH:
            deeper = deeper_maps(old, new)
            yield from [] if deeper is None else [_Candidate("new layers add 0", deeper, larger)]
        elif old.shapes.keys() == new.shapes.keys():
            yield from self._wider(step, old, new, larger)

    def _changes(self, step: SizeStep) -> dict[str, tuple[int, int]]:
        """Return the sizes of a step by the name of their field; the first sizes of several components."""
        old = dict(leaf_values(self.graph.spec.model))
        sizes = {path[-1]: (old.get(path), value) for path, value in reversed([*step.values.items()])}
        return {name: (a, b) for name, (a, b) in sizes.items() if type(a) is int and type(b) is int}

    def _wider(self, step: SizeStep, old: SizedModel, new: SizedModel, larger: Graph) -> Iterator[_Candidate]:
        if step.field == WIDTH:
            maps = repeated_maps(old, new)
            yield from () if maps is None else _with_heads(maps, old, self.graph, larger)
            return
        sizes = sizes_of(old, new, self._changes(step))
        for rule in RULES:
            maps = grown_maps(old, new, rule, sizes)
            if maps is not None:
                for graph in _with_scales(self.graph, larger, copied=rule.layout == "copies_inside"):
                    yield _Candidate(rule.words, maps, graph)


def _no_rule(step: SizeStep, changes: Mapping[str, tuple[int, int]], *, is_nested: bool = False) -> Diagnostic:
    message = f"no rule gives the weights for `{step.title}`"
    if is_nested:
        note = "two changes append to the same axis of a weight, which a map cannot express"
        return Diagnostic(message, notes=(note,), help="grow by one change, and then by the other from the result")
    if any(new < old for old, new in changes.values()):
        return Diagnostic(message, help="let every size grow, except the number of key-value heads")
    multiples = " or ".join(f"{key}={2 * old}" for key, (old, new) in changes.items() if new % old)
    if multiples:
        return Diagnostic(message, help=f"choose a multiple of the size, such as {multiples}")
    note = "the growth of its weights follows neither from its layers nor from the sizes of the spec"
    help = "grow by one change in each command, from the result of the command before"
    return Diagnostic(message, notes=(note,), help=help)


def _joined(first: SizeStep, second: SizeStep) -> SizeStep:
    return SizeStep(f"{first.title}, {second.title}", {**first.values, **second.values}, replaces=first.replaces)


def _with_heads(maps: Maps, old: SizedModel, before: Graph, larger: Graph) -> Iterator[_Candidate]:
    """Yield the results of a wider stream, for embeddings with a factor that depends on the width, and tied heads.

    The logits of a tied head are sums over repeated channels: the norm before the head is divided, or its `scale`.
    """
    words, divided = COPIES.words, dict(maps)
    factors = {node.name: _table_factor(node) / _table_factor(before.node(node.name)) for node in larger.nodes}
    for name, factor in factors.items():
        table = f"{name}.tokens.weight"
        if table in divided:
            divided[table] = replace(divided[table], divisor=divided[table].divisor * factor)
    heads = [(head, table) for table, names in heads_of_tables(larger).items() for head in names]
    if not heads:
        yield _Candidate(words, divided, larger)
        return
    normed, scaled, scales = dict(divided), dict(divided), dict[FieldPath, Any]()
    for name, table in heads:
        node, head = larger.node(name), before.node(name).config.head()
        ratio = _table_width(larger, name) / _table_width(before, name) / factors[table]
        over, before_head = node.config.head().scale / head.scale * ratio, _norms_before(old, name, node)
        for key, entry in divided.items():
            if key.startswith(before_head):
                normed[key] = replace(entry, divisor=entry.divisor * over)
            elif (
                key.startswith(f"{name}.")
                and key.endswith(".bias")
                and old.shapes[key] == old.shapes[f"{table}.tokens.weight"][:1]
            ):
                scaled[key] = replace(entry, divisor=entry.divisor / ratio)  # `scale` multiplies the bias, too
        scales["graph", name, "scale"] = head.scale / ratio
    if normed != divided:
        yield _Candidate(words, normed, larger)
    graph = changed(larger.spec, scales)
    if graph is not None:
        yield _Candidate(f"{words}, and the logits are divided", scaled, graph)


def _norms_before(old: SizedModel, name: str, node: Node) -> tuple[str, ...]:
    """Return the prefixes of the weights of the norm whose output a head multiplies by its table."""
    components: Mapping[str, Config] = old.model.meta["components"]
    inside = [
        path for path, config in components.items() if path.startswith(f"{name}.") and isinstance(config, NormConfig)
    ]
    return tuple(f"{path}." for path in inside or [f"{node.wires.get('input')}.final_norm"])


def _table_factor(node: Node) -> float:
    """Return the fixed factor of the rows of an embedding table."""
    return math.prod(stage.number for stage in node.config.after_table() if isinstance(stage, Scale))


def _table_width(graph: Graph, name: str) -> int:
    signals = graph.node(name).signals.values()
    return next(signal.width for signal in signals if not isinstance(signal, list) and signal.type == "table")


def _with_scales(graph: Graph, larger: Graph, *, copied: bool) -> Iterator[Graph]:
    """Yield the graph of a step, with the factor of the scores if the width of heads changes."""
    old, new = dict(parts((), graph.spec.model)), dict(parts((), larger.spec.model))
    scales: dict[FieldPath, Any] = {}
    for path, part in new.items():
        before = old.get(path)
        if isinstance(part, AttentionConfig) and isinstance(before, AttentionConfig):
            ratio = part.score_width / before.score_width
            if ratio != 1 and before.score_scale is not None and "scale" in type(part).model_fields:
                scales[*path, "scale"] = before.score_scale / (ratio if copied else 1)
    scaled = changed(larger.spec, scales) if scales else None
    yield larger if scaled is None else scaled

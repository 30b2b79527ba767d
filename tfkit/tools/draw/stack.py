"""A stack of the graph as a tower of layers: its plan, and the steps of each layer as segments of boxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfkit.component import NormConfig
from tfkit.errors import ranges
from tfkit.graph.expand import Node
from tfkit.tools.common.ownership import LABELS
from tfkit.tools.draw.notes import chips_of, notes_of, tip_of, window_of
from tfkit.tools.draw.parameter_counts import ParameterCounts
from tfkit.tools.draw.scene import Box, Chip, Layer, Mark, Note, Segment, Tower
from tfkit.tools.show.values import number, text_of

LONGEST = 44
"""Longest list of layers or pattern, in characters."""
MOST = 3
"""Most values that distinguish layers which look alike."""


def tower(node: Node, key: str, counts: ParameterCounts) -> Tower:
    """The tower of a node whose config has a `plan`."""
    config: Any = node.config
    plan = config.plan()
    names = list(dict.fromkeys(name for name, _ in plan))
    drawers = []
    for name in names:
        indices = [index for index, (other, _) in enumerate(plan) if other == name]
        drawers.append(_Layers(node, plan[indices[0]][1], f"{key}/{name}", name, indices, counts))
    layers = tuple(_told_apart([drawer.draw(alone=len(names) == 1) for drawer in drawers], drawers))
    norm = config.closing_norm()
    closing = None
    if norm is not None:
        path = f"{node.name}.final_norm"
        closing = norm_box(norm, f"{key}/final_norm", counts.label(path), counts.take(path))
    order = tuple(names.index(name) for name, _ in plan)
    notes, rest = tuple(_notes(node, varied=len(names) > 1)), counts.take(node.name)
    made = Tower(key, node.name, notes, layers, order, closing, rest, rest, tip_of(config))
    inside = sum(box.total for layer in layers for box in layer.boxes())
    return replace(made, parameters=inside + rest)


def _told_apart(layers: list[Layer], drawers: list[_Layers]) -> Iterator[Layer]:
    """The layers, with a note in those that look like another one: the values in which they differ."""
    for index, (layer, drawer) in enumerate(zip(layers, drawers, strict=True)):
        twin = next((other for other, seen in enumerate(layers[:index]) if _looks(seen) == _looks(layer)), None)
        own: dict[str, str] = {} if twin is None else drawer.values_unlike(drawers[twin])
        told = {name: value for name, value in own.items() if value != "false"} or own
        notes = [Note(name, f"{name} {value}") for name, value in list(told.items())[:MOST]]
        yield replace(layer, notes=(*layer.notes, *notes))


def _looks(layer: Layer) -> list[object]:
    return [(box.title, box.notes, [chip.text for chip in box.chips]) for box in layer.boxes()]


def norm_box(norm: NormConfig, key: str, label: str, parameters: int, times: int = 1) -> Box:
    """The box of a norm; `label` is its class."""
    return Box(key, "norm", label or norm.kind_name(), parameters=parameters, times=times, tip=tip_of(norm))


def _notes(node: Node, *, varied: bool) -> Iterator[Note]:
    config: Any = node.config
    yield Note("d_model", f"d_model {config.d_model:,}")
    sets = len(config.plan())
    if sets < config.n_layers:
        each = f", each {config.repeats()} times in a row" if sets > 1 else ""
        yield Note("shared", f"{sets} set{'s' if sets > 1 else ''} of weights{each}")
    pattern = config.layers.pattern if varied and config.layers else None
    if pattern is not None and len(text_of(pattern)) <= LONGEST:
        yield Note("pattern", f"pattern {text_of(pattern)}")
    if "prefix" in node.wires:
        yield Note("prefix", f"{node.wires['prefix']}: this many tokens are read in both directions")


@dataclass(frozen=True)
class _Layers:
    """The layers `indices` of a stack, all like `layer`; their boxes count the weights of one."""

    node: Node
    layer: Any
    key: str
    name: str
    indices: Sequence[int]
    counts: ParameterCounts

    def draw(self, *, alone: bool) -> Layer:
        config: Any = self.node.config
        segments = tuple(self._segments())
        each = sum(box.parameters for segment in segments for box in segment.boxes())
        where = ranges(self.indices)
        shown = not alone and len(where) <= LONGEST
        notes = (Note("layers", f"layer{'s' * (len(self.indices) > 1)} {where}"),) if shown else ()
        name = self.node.name if alone else self.name
        return Layer(self.key, name, len(self.indices) * config.repeats(), notes, each, segments)

    def values_unlike(self, other: _Layers) -> dict[str, str]:
        """The values of this layer in which another one differs, by their path in the layer."""
        fields = type(self.layer).model_fields.keys() & type(other.layer).model_fields.keys()
        theirs = set(tip_of(other.layer))
        own = ((name, value) for name, value in tip_of(self.layer)[1:] if (name, value) not in theirs)
        return {name: value for name, value in own if name.partition(".")[0] in fields}

    def _segments(self) -> Iterator[Segment]:
        """The steps in groups that are added together."""
        steps = self.layer.steps(memory="memory" in self.node.wires)
        groups: list[list[Any]] = []
        for step in steps:
            if groups and _joins(step, groups[-1], first=len(groups) == 1):
                groups[-1].append(step)
            else:
                groups.append([step])
        fresh = True  # the norm of the layer's input has one set of weights, however many segments read it
        for number_, group in enumerate(groups):
            yield self._segment(group, first=number_ == 0, fresh=fresh)
            fresh = fresh and not any(step.reads_input for step in group)

    def _segment(self, group: list[Any], *, first: bool, fresh: bool) -> Segment:
        together = all(step.reads_input for step in group)
        norm = self.layer.norm_of_input()
        stem = self._norm(norm, "input_norm", fresh=fresh) if norm and any(step.reads_input for step in group) else None
        branches = [list(self._branch(step)) for step in group]
        for step, branch in zip(group, branches, strict=True):
            if stem is not None and not together and step.reads_input:
                branch.insert(0, stem)
        last = group[-1]
        return Segment(
            branches=tuple(map(tuple, branches)),
            stem=stem if together else None,
            reads_input=together and not first,
            onto="stream" if last.residual.onto == "previous" else "normed",
            factor=self._learned(last, last.residual.learned_onto, "residual_scale_onto"),
            after=self._norm(last.norm_after, f"{last.name}_norm_after") if last.norm_after else None,
        )

    def _branch(self, step: Any) -> Iterator[Box | Mark]:
        if step.norm_in is not None:
            yield self._norm(step.norm_in, f"{step.name}_norm_in")
        yield self._sublayer(step)
        if step.norm_out is not None:
            yield self._norm(step.norm_out, f"{step.name}_norm_out")
        learned = self._learned(step, step.residual.learned, "residual_scale")
        if learned is not None:
            yield learned
        if step.residual.scale != 1:
            yield Mark(f"{self.key}/{step.name}_scale", f"× {number(step.residual.scale)}")

    def _norm(self, norm: NormConfig, name: str, *, fresh: bool = True) -> Box:
        label = self.counts.label(f"{self.node.name}.layers.{self.indices[0]}.{name}")
        count = self._count(name) if fresh else 0
        box = norm_box(norm, f"{self.key}/{name}", label, count, len(self.indices))
        return box if fresh else replace(box, tied=True)

    def _learned(self, step: Any, learned: str, name: str) -> Box | None:
        if learned == "none":
            return None
        name = f"{step.name}_{name}"
        times = len(self.indices)
        title = f"× learned {learned}"
        return Box(f"{self.key}/{name}", "step", title, parameters=self._count(name), times=times)

    def _sublayer(self, step: Any) -> Box:
        crossed = step.sublayer == "cross_attention"
        config = self.layer.ffn if step.sublayer == "ffn" else self.layer.attention_of(step.sublayer)
        notes = [Note("kind", config.kind_name()), *notes_of(config)]
        chips = list(chips_of(config))
        title = LABELS.get(step.sublayer, step.sublayer)
        if step.sublayer == "attention":
            mask = config.mask or self.node.config.default_mask()  # type: ignore[attr-defined]
            title = "causal self-attention" if mask.causal else "self-attention"
            notes += [] if config.mask else window_of(mask)
            chips = [self._with_shared(chip) if chip.key == "position" else chip for chip in chips]
        parts = self._experts(step.name) if hasattr(config, "n_experts") else ()
        return Box(
            key=f"{self.key}/{step.name}",
            role="cross_attention" if crossed else str(config.slot),
            title=title,
            notes=tuple(notes),
            chips=tuple(chips),
            parts=parts,
            parameters=sum(part.parameters for part in parts) + self._count(step.name),
            times=len(self.indices),
            tip=tip_of(config),
        )

    def _experts(self, name: str) -> tuple[Box, ...]:
        """The boxes of a mixture: the router, the chosen experts, the shared ones."""
        children = self.counts.children(f"{self.node.name}.layers.{self.indices[0]}.{name}")
        made = []
        for child in children:
            key = f"{self.key}/{name}/{child}"
            made.append(Box(key, "part", child.replace("_", " "), parameters=self._count(f"{name}.{child}")))
        return tuple(made)

    def _with_shared(self, chip: Chip) -> Chip:
        """Positions with weights: those of these layers, or of all that share them, counted where they come first."""
        names = [self.name, *map(str, self.indices)]
        return replace(chip, parameters=sum(self.counts.take(f"{self.node.name}.shared.{name}") for name in names))

    def _count(self, name: str) -> int:
        """The parameters of a module of one layer; those of all the others are taken too."""
        taken = [self.counts.take(f"{self.node.name}.layers.{index}.{name}") for index in self.indices]
        return taken[0]


def _joins(step: Any, group: list[Any], *, first: bool) -> bool:
    """True if a step is added together with those of the group, because it does not read their sum."""
    last = group[-1]
    reads_same = step.reads_input and (first or last.reads_input)
    plain = step.residual.learned_onto == "none" and step.residual.onto == last.residual.onto == "previous"
    return reads_same and plain and last.norm_after is None

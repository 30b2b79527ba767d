"""A stack of the graph as a tower of layers, with the sublayers of each layer as boxes.

The notes of a box are the sizes and unusual values of its config; its tip has all values. The code depends on no kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfkit import component
from tfkit.component import (
    AttentionConfig,
    Call,
    Component,
    Config,
    Layers,
    LearnedFactor,
    MaskConfig,
    NormConfig,
    PatchMarker,
    Scale,
    SharedMarker,
    Step,
    WireMarker,
    marker,
)
from tfkit.errors import number_ranges
from tfkit.graph.expand import Node
from tfkit.plugin.registry import first_paragraph
from tfkit.tools.common.ownership import LABELS
from tfkit.tools.draw.parameter_counts import ParameterCounts
from tfkit.tools.draw.scene import Box, Chip, DrawnLayer, Mark, Note, Segment, Tower
from tfkit.tools.show.resolved_values import number_text, text_of

MAX_VALUE = 40
"""Maximum length of a value in a picture, in characters."""
MINOR_FIELDS = ("dropout", "eps")
"""Fields that do not affect the architecture."""
Tip = tuple[tuple[str, str], ...]


def notes_of(config: Config) -> Iterator[Note]:
    """Yield the notes in the box of a config: its sizes, and all unusual values."""
    for name, value in sorted(_distinctive_fields(config), key=lambda field: not field[0].startswith("n_")):
        if isinstance(value, MaskConfig):
            yield from window_of(value)
        elif not isinstance(value, Config):
            yield Note(name, field_text(name, value))
    if isinstance(config, AttentionConfig) and "d_head" in type(config).model_fields and config.d_head is None:
        yield Note("d_head", f"d_head {config.head_width}")


def chips_of(config: Config) -> Iterator[Chip]:
    """Yield the components and mappings inside a config."""
    for name, value in _distinctive_fields(config):
        if isinstance(value, Config) and not isinstance(value, MaskConfig):
            role = value.slot if isinstance(value, Component) else "step"
            yield Chip(name, role, _config_text(name, value))


def window_of(mask: MaskConfig) -> Iterator[Note]:
    """Yield the window of attention, unless it covers all tokens or all earlier tokens; then the rule of the mask."""
    if mask.left is not None and mask.causal:
        yield Note("mask", f"window {mask.left + 1:,}")
    elif mask.left is not None or mask.right:
        sides = ("all" if side is None else f"{side:,}" for side in (mask.left, mask.right))
        yield Note("mask", f"window {' + '.join(sides)}")
    if mask.rule is not None:
        yield Note("rule", _config_text(mask.rule.slot, mask.rule))


def field_text(name: str, value: Any) -> str:
    """Format a field: `32 heads`, `d_ff 3,072`, `sinks`."""
    words = name if name.startswith("d_") else name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"no {words}"
    if isinstance(value, int) and name.startswith("n_"):
        words = words.removeprefix("n ").removesuffix("s" if value == 1 else "")
        return f"{value:,} {words}"
    return f"{words} {number_text(value)}"


def tip_of(config: Config) -> Tip:
    """Return the text under the pointer: the purpose of a config, then all of its values."""
    return (("", first_paragraph(type(config).__doc__ or "")), *_config_values(config, ""))


def _distinctive_fields(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the fields that distinguish this config from other configs of its kind."""
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(config, Component) and name == config.word_key:
            continue
        # Values that an entire model shares, or that come from another node, are shown elsewhere.
        if any(marker(info, kind) for kind in (SharedMarker, WireMarker, PatchMarker)) or name in MINOR_FIELDS:
            continue
        if value is None or (not info.is_required() and value == info.get_default(call_default_factory=True)):
            continue
        if isinstance(value, Config) or len(text_of(value)) <= MAX_VALUE:
            yield name, value


def _config_text(name: str, config: Config) -> str:
    """Format a config: `rope: theta 10,000, linear`. The field's name appears only if the slot's name is ambiguous."""
    words = name.replace("_", " ")
    if isinstance(config, Component):
        words = config.kind_name() if name == config.slot else f"{words} {config.kind_name()}"
    facts = []
    for key, value in _distinctive_fields(config):
        if not isinstance(value, Config):
            facts.append(field_text(key, value))
        elif isinstance(value, Component):
            facts.append(f"{value.kind_name()} {key.replace('_', ' ')}")
        else:
            facts.append(_config_text(key, value))
    if isinstance(config, NormConfig):
        return words
    return f"{words}: {', '.join(facts)}" if facts else words


def _config_values(config: Config, prefix: str) -> Iterator[tuple[str, str]]:
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        is_named = prefix and isinstance(config, Component) and name == config.word_key
        if is_named or any(marker(info, kind) for kind in (PatchMarker, WireMarker)):
            continue
        yield from _field_values(f"{prefix}{name}", value)


def _field_values(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Config):
        if isinstance(value, Component):
            yield name, value.kind_name()
        yield from _config_values(value, f"{name}.")
    elif any(isinstance(item, Config) for item in _nested_items(value)):
        return
    elif value is not None:
        text = text_of(value)
        yield name, text if len(text) <= 2 * MAX_VALUE else f"{text[: 2 * MAX_VALUE]}..."


def _nested_items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()


MAX_LIST = 44
"""Maximum length of a list of layers or of a pattern, in characters."""
MAX_VALUES = 3
"""Maximum number of values in a note that distinguishes layers with equal pictures."""


def stack_tower(node: Node, stack: Layers, key: str, counts: ParameterCounts) -> Tower:
    """Build the tower of a stack."""
    names = list(stack.variants)
    drawers = [_Layers(node, stack, f"{key}/{name}", indices, counts) for name, indices in stack.variants.items()]
    layers = tuple(_distinguished_layers([drawer.draw(alone=len(names) == 1) for drawer in drawers], drawers))
    closing = None
    if stack.final_norm is not None:
        path = f"{node.name}.final_norm"
        closing = norm_box(stack.final_norm, f"{key}/final_norm", counts.label(path), counts.take(path))
    order = tuple(names.index(layer.name) for layer in stack.layers)
    notes, rest = tuple(_stack_notes(node, stack)), counts.take(node.name)
    drawn = Tower(key, node.name, notes, layers, order, closing, rest, rest, tip_of(node.config))
    inside = sum(box.total for layer in layers for box in layer.boxes())
    return replace(drawn, parameters=inside + rest)


def _distinguished_layers(layers: list[DrawnLayer], drawers: list[_Layers]) -> Iterator[DrawnLayer]:
    """Yield the layers. A layer that looks like an earlier layer gets a note with the values that differ."""
    for index, (layer, drawer) in enumerate(zip(layers, drawers, strict=True)):
        twin = next(
            (
                other
                for other, drawn in enumerate(layers[:index])
                if _layer_appearance(drawn) == _layer_appearance(layer)
            ),
            None,
        )
        values: dict[str, str] = {} if twin is None else drawer.values_unlike(drawers[twin])
        notable = {name: value for name, value in values.items() if value != "false"} or values
        notes = [Note(name, f"{name} {value}") for name, value in list(notable.items())[:MAX_VALUES]]
        yield replace(layer, notes=(*layer.notes, *notes))


def _layer_appearance(layer: DrawnLayer) -> list[object]:
    return [(box.title, box.notes, [chip.text for chip in box.chips]) for box in layer.boxes()]


def norm_box(norm: Component, key: str, label: str, parameters: int, times: int = 1) -> Box:
    """Build the box of a norm; `label` is its class."""
    return Box(key, "norm", label or norm.kind_name(), parameters=parameters, times=times, tip=tip_of(norm))


def _stack_notes(node: Node, stack: Layers) -> Iterator[Note]:
    yield Note("width", f"d_model {node.output.width:,}")
    if stack.repeated:
        sets = len(stack.layers)
        each = f", {stack.repetition}" if sets > 1 else ""
        yield Note("layers", f"{sets} set{'s' if sets > 1 else ''} of weights{each}")
    if len(stack.variants) > 1 and stack.pattern is not None and len(text_of(stack.pattern)) <= MAX_LIST:
        yield Note("pattern", f"pattern {text_of(stack.pattern)}")
    if stack.streams is not None:
        yield Note("residual", f"residual {stack.streams.kind_name()}")
    if stack.prefix is not None:
        yield Note("prefix", f"{stack.prefix}: this many tokens are read in both directions")
    if stack.blocks is not None:
        yield Note("blocks", f"{stack.blocks}: the tokens of a block are read in both directions")


@dataclass(frozen=True)
class _Layers:
    """Identical layers of a stack, with the indices `indices`. Their boxes count the weights of a single layer."""

    node: Node
    stack: Layers
    key: str
    indices: Sequence[int]
    counts: ParameterCounts

    @property
    def layer(self) -> component.Layer:
        """The first of the layers."""
        return self.stack.layers[self.indices[0]]

    def draw(self, *, alone: bool) -> DrawnLayer:
        segments = tuple(self._segments())
        each = sum(box.parameters for segment in segments for box in segment.boxes())
        where = number_ranges(self.indices)
        listed = not alone and len(where) <= MAX_LIST
        notes = (Note("indices", f"layer{'s' * (len(self.indices) > 1)} {where}"),) if listed else ()
        name = self.node.name if alone else self.layer.name
        count = sum(map(self.stack.runs.count, self.indices))
        return DrawnLayer(self.key, name, count, notes, each, segments)

    def values_unlike(self, other: _Layers) -> dict[str, str]:
        """Return the values of this layer that differ from another layer's, by path in the layer."""
        mine, other_config = self.layer.config, other.layer.config
        fields = type(mine).model_fields.keys() & type(other_config).model_fields.keys()
        theirs = set(tip_of(other_config))
        values = ((name, value) for name, value in tip_of(mine)[1:] if (name, value) not in theirs)
        return {name: value for name, value in values if name.partition(".")[0] in fields}

    def _segments(self) -> Iterator[Segment]:
        """Return the segments: groups of sublayers whose outputs are added to the stream together."""
        groups: list[list[Step]] = []
        for step in self.layer.steps:
            if groups and _is_parallel(step, groups[-1], first=len(groups) == 1):
                groups[-1].append(step)
            else:
                groups.append([step])
        around = self.layer.around
        fresh = True  # count the norm of the layer's input only in the first segment that reads it
        for number_, group in enumerate(groups):
            segment = self._segment(group, first=number_ == 0, fresh=fresh)
            fresh = fresh and not any(step.reads_input for step in group)
            if around is not None and number_ == 0:
                segment = replace(segment, before=self._residual(Call("residual_read", around)))
            yield segment
        if around is not None:
            yield Segment(branches=(), after=self._residual(Call("residual_write", around)))

    def _segment(self, group: list[Step], *, first: bool, fresh: bool) -> Segment:
        together = all(step.reads_input for step in group)
        norm = self.layer.input_norm
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
            onto=last.addition.onto,
            factor=self._onto(last),
            write=self._residual(last.write) if last.write else None,
            after=self._norm(last.norm_after, f"{last.name}_norm_after") if last.norm_after else None,
        )

    def _branch(self, step: Step) -> Iterator[Box | Mark]:
        if step.read is not None:
            yield self._residual(step.read)
        for part in step.branch():
            if isinstance(part, Call):
                yield self._sublayer(step) if part.name == step.name else self._norm(part.config, part.name)
            elif isinstance(part, LearnedFactor):
                yield self._learned(part)
            elif isinstance(part, Scale):
                yield Mark(f"{self.key}/{step.name}_scale", f"× {number_text(part.number)}")

    def _norm(self, norm: Component, name: str, *, fresh: bool = True) -> Box:
        label = self.counts.label(f"{self.node.name}.layers.{self.indices[0]}.{name}")
        count = self._count(name) if fresh else 0
        box = norm_box(norm, f"{self.key}/{name}", label, count, len(self.indices))
        return box if fresh else replace(box, tied=True)

    def _residual(self, part: Call) -> Box:
        location = part.name.rpartition("_")[2]
        notes = notes_of(part.config) if location == "read" else ()
        title = f"{part.config.kind_name()}, {location}"
        key, times, tip = f"{self.key}/{part.name}", len(self.indices), tip_of(part.config)
        return Box(key, "step", title, tuple(notes), parameters=self._count(part.name), times=times, tip=tip)

    def _learned(self, factor: LearnedFactor) -> Box:
        title, count = f"× learned {factor.shape}", self._count(factor.name)
        return Box(f"{self.key}/{factor.name}", "step", title, parameters=count, times=len(self.indices))

    def _onto(self, step: Step) -> Box | None:
        """Return the box of the factors of the value to which the output of a sublayer is added; None for 1."""
        box = None if step.onto is None else self._learned(step.onto)
        if step.addition.scale_onto == 1:
            return box
        title = f"× {number_text(step.addition.scale_onto)}"
        if box is not None:
            return replace(box, title=f"{title} {box.title}")
        return Box(f"{self.key}/{step.name}_scale_onto", "step", title)

    def _sublayer(self, step: Step) -> Box:
        config = step.config
        notes = [Note("kind", config.kind_name()), *notes_of(config)]
        notes += [
            Note(word, ", ".join(wires)) for word, wires in (("takes", step.takes), ("gives", step.gives)) if wires
        ]
        chips = list(chips_of(config))
        title = LABELS.get(step.role, step.role.replace("_", " "))
        if isinstance(config, AttentionConfig) and step.mask is not None:
            title = "causal self-attention" if step.mask.causal else "self-attention"
            notes += [] if config.mask else window_of(step.mask)
            chips = [self._with_shared(chip) if chip.key == "position" else chip for chip in chips]
        parts = self._parts(step.name) if config.drawn_apart else ()
        return Box(
            key=f"{self.key}/{step.name}",
            role=step.role,
            title=title,
            notes=tuple(notes),
            chips=tuple(chips),
            parts=parts,
            parameters=sum(part.parameters for part in parts) + self._count(step.name),
            times=len(self.indices),
            tip=tip_of(config),
        )

    def _parts(self, name: str) -> tuple[Box, ...]:
        """Build the boxes inside a sublayer: the router, the chosen experts, the shared experts."""
        children = self.counts.children(f"{self.node.name}.layers.{self.indices[0]}.{name}")
        boxes = []
        for child in children:
            key = f"{self.key}/{name}/{child}"
            boxes.append(Box(key, "part", child.replace("_", " "), parameters=self._count(f"{name}.{child}")))
        return tuple(boxes)

    def _with_shared(self, chip: Chip) -> Chip:
        """Count the position weights of these layers. Weights that layers share count in the first of these layers."""
        contexts = [self.stack.layers[index].context for index in self.indices]
        return replace(chip, parameters=sum(self.counts.take(f"{self.node.name}.{path}") for path in contexts if path))

    def _count(self, name: str) -> int:
        """Remove the parameters of a module from the counts in all layers, and return the count of one layer."""
        taken = [self.counts.take(f"{self.node.name}.layers.{index}.{name}") for index in self.indices]
        return taken[0]


def _is_parallel(step: Step, group: list[Step], *, first: bool) -> bool:
    """Return True if a sublayer is added together with the group, because it does not read the group's sum."""
    last = group[-1]
    reads_same = step.reads_input and (first or last.reads_input)
    plain = step.onto is None and step.addition.scale_onto == 1
    plain = plain and step.addition.onto == last.addition.onto == "previous"
    return reads_same and plain and last.norm_after is None

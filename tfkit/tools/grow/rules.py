"""Rules of growth: the growth of every axis of every weight in a step, derived from the model at both sizes.

The models of a step are built on the meta device. Where they differ in shape, an axis grows. Its role follows from the
layer: linear layers write rows and read columns. A rule arranges old and new values along an axis. Several rules may
fit, and the proof decides: the first rule that leaves the function unchanged is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from torch import fx, nn

from tfkit.checkpoint.pattern import UNCHANGED, ZERO
from tfkit.checkpoint.tensor_names import enclosing_modules
from tfkit.checkpoint.weight_map import TensorLocation, tensor_locations_of
from tfkit.component import AttentionConfig, Config
from tfkit.nn import StackedLinear
from tfkit.nn.spread import outlines
from tfkit.tools.grow.axes import Axis, AxisFactor, axis_of, composed, new_size, plain_axis, with_fill

Role: TypeAlias = Literal["written", "read", "stacked"]
"""The role of an axis: outputs that a layer writes, inputs that it reads, or layers of a stack."""
MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose weights have outputs on the first axis and inputs on the second."""
UNEVEN = ("end", "group", "inside")
"""Layouts for which the new size need not be a multiple of the old size."""
KEYS = "k"
"""The part of a fused projection whose new rows are zero where a head gets wider, so that scores do not change."""


@dataclass(frozen=True)
class TensorMap:
    """The source of a weight: a weight of the old model with the growth of its axes."""

    source: str | None
    """None for a weight that keeps its initial values."""
    axes: tuple[Axis, ...] = ()
    inserted: int = 0
    """The number of first axes that the old weight lacks."""
    divisor: float = 1.0
    is_zero: bool = False
    new_gradient: bool = False
    """True if its gradient does not follow from the gradient of its source: in new layers and experts, and for copies
    that different weights read."""

    @property
    def keeps_gradient(self) -> bool:
        """True if its gradient consists of the values of the source's gradient, times a number."""
        averages = any(factor.new == 1 < factor.old for axis in self.axes for segment in axis for factor in segment)
        return not (self.source is None or self.is_zero or self.new_gradient or averages)

    def then(self, step: TensorMap) -> TensorMap:
        """Return the map of both growths, one after the other. Raise NestedGrowth if a pattern cannot express it."""
        both = replace(self, axes=step.axes, new_gradient=self.new_gradient or step.new_gradient)
        if self.source is None or self.is_zero or step.is_zero:
            return replace(both, is_zero=self.is_zero or step.is_zero)
        inserted = step.axes[: step.inserted]
        axes = (*inserted, *map(composed, self.axes, step.axes[step.inserted :]))
        divisor = self.divisor * step.divisor
        return replace(both, axes=axes, inserted=self.inserted + step.inserted, divisor=divisor)


@dataclass(frozen=True)
class GrowthRule:
    """An arrangement of old and new values along the axes that grow in a step."""

    words: str
    """The rule as a description, for reports."""
    layout: Literal["end", "group", "copies", "inside", "stride", "pairs", "copies_inside", "mean"]
    first: bool = True
    """True if the part of an axis that grows is before the part that does not."""
    written: str = UNCHANGED
    read: str = ZERO
    keys: str = UNCHANGED
    """The fill of rows of the part `k`."""

    def axis(self, old: int, new: int, sizes: SizeChange) -> Axis | None:
        """Return the growth of an axis, or None if the rule does not fit its sizes."""
        unit, rest = divmod(new - old, sizes.new - sizes.old)
        fixed = old - unit * sizes.old
        if rest or unit < 1 or fixed < 0:
            return None
        if fixed and self.layout == "inside":  # the last channels of each block grow
            block = AxisFactor(old // unit, new // unit, UNCHANGED)
            return None if old % unit else axis_of(AxisFactor(unit, unit), block)
        factors = self._factors(unit, sizes)
        if not factors:
            return None
        grown = axis_of(*factors)
        if not fixed:
            return grown if self.first else None
        segments = (*grown, *plain_axis(fixed))
        return segments if self.first else segments[::-1]

    def _factors(self, unit: int, sizes: SizeChange) -> tuple[AxisFactor, ...]:
        """Return the factors of the part of an axis that grows; none if the rule does not fit."""
        old, new = sizes.old, sizes.new
        inner, all_old = AxisFactor(unit, unit), AxisFactor(old, old)
        if self.layout == "mean":
            return () if old % new else (AxisFactor(new, new), AxisFactor(old // new, 1), inner)
        if new < old or (self.layout not in UNEVEN and new % old):
            return ()
        times, groups = new // old, sizes.group
        layouts = {
            "end": (AxisFactor(old, new, UNCHANGED), inner),
            "group": (AxisFactor(groups, groups), AxisFactor(old // groups, new // groups, UNCHANGED), inner),
            "copies": (all_old, AxisFactor(1, times), inner),
            "inside": (inner, AxisFactor(old, new, UNCHANGED)),
            "copies_inside": (inner, all_old, AxisFactor(1, times)),
            "stride": (inner, all_old, AxisFactor(1, times, UNCHANGED)),
            "pairs": (inner, AxisFactor(old // 2, old // 2), AxisFactor(1, times, UNCHANGED), AxisFactor(2, 2)),
        }
        fits = {"group": groups > 1, "pairs": old % 2 == 0}.get(self.layout, True)
        return layouts[self.layout] if fits else ()


@dataclass(frozen=True)
class SizeChange:
    """A size of a component at the two ends of a step, and other sizes that may group it."""

    old: int
    new: int
    groups: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        """The largest number of groups that divides both sizes."""
        fits = (n for n in self.groups if 1 < n < self.old and not self.old % n and not self.new % n)
        return max(fits, default=1)


COPIES = GrowthRule("each value is repeated", "copies")
MEAN = GrowthRule("the mean of adjacent units", "mean")
RULES = (
    MEAN,
    GrowthRule("new units, read as 0", "end"),
    GrowthRule("new units in each group, read as 0", "group"),
    COPIES,
    replace(COPIES, first=False),
    GrowthRule("new channels, with keys of 0", "inside", keys=ZERO),
    GrowthRule("new channels between, with keys of 0", "stride", keys=ZERO),
    GrowthRule("new pairs between, with keys of 0", "pairs", keys=ZERO),
    GrowthRule("each channel is repeated", "copies_inside"),
    GrowthRule("new values of 0", "end", written=ZERO, read=UNCHANGED, keys=ZERO),
    GrowthRule("new values of 0", "inside", written=ZERO, read=UNCHANGED, keys=ZERO),
)


@dataclass(frozen=True)
class SizedModel:
    """A model on the meta device, with its weights by name."""

    model: fx.GraphModule
    locations: Mapping[str, TensorLocation]
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)

    @classmethod
    def of(cls, model: fx.GraphModule) -> SizedModel:
        """Return the names and shapes of the weights of a model."""
        locations, state = tensor_locations_of(model), outlines(model.state_dict())
        return cls(model, locations, {name: tuple(at.view(state).shape) for name, at in locations.items()})

    def roles(self, name: str) -> tuple[Role, ...]:
        """Return the roles of the axes of a weight."""
        path = self.locations[name].parameter.rpartition(".")[0]
        owner, rank = self.model.get_submodule(path), len(self.shapes[name])
        is_weight = name.endswith(".weight")
        of_stack: tuple[Role, ...] = ("stacked", "written", "read")
        roles: list[Role] = ["written"] * rank
        if isinstance(owner, StackedLinear):
            return of_stack[:rank]
        if is_weight and isinstance(owner, MATRICES):
            roles[1] = "read"
        return tuple(roles)

    def holds_heads(self, name: str, count: int) -> bool:
        """Return True if a weight computes `count` key-value heads, which can be means of more heads."""
        attentions = (config for config in self.configs(name) if isinstance(config, AttentionConfig))
        return any(config.kv_heads == count < config.n_heads for config in attentions)

    def configs(self, name: str) -> Iterator[Config]:
        """Yield the configs of the components around a weight, the innermost first."""
        components = self.model.meta["components"]
        yield from (components[path] for path in enclosing_modules(name) if path in components)


def grown_maps(
    old: SizedModel, new: SizedModel, rule: GrowthRule, sizes: Mapping[str, SizeChange]
) -> dict[str, TensorMap] | None:
    """Return the map of each weight by a rule; None if the rule does not fit. `sizes` has the size of each weight."""
    maps = {}
    for name, shape in new.shapes.items():
        axes, divisor = [], 1.0
        for before, after, role in zip(old.shapes[name], shape, new.roles(name), strict=True):
            axis = plain_axis(after) if before == after else rule.axis(before, after, sizes[name])
            if axis is None or (after < before and not new.holds_heads(name, sizes[name].new)):
                return None
            fill = rule.read if role == "read" else rule.keys if name.split(".")[-2] == KEYS else rule.written
            axes.append(with_fill(axis, fill))
            if role == "read" and before != after and rule.layout in ("copies", "copies_inside"):
                divisor *= new_size(axis) / before
        maps[name] = TensorMap(name, tuple(axes), divisor=divisor)
    if rule.layout in ("copies", "copies_inside") and all(entry.divisor == 1 for entry in maps.values()):
        # No weight reads all copies: as with key-value heads, the gradient is divided among them unevenly.
        maps = {name: replace(entry, new_gradient=old.shapes[name] != new.shapes[name]) for name, entry in maps.items()}
    return maps


def repeated_maps(old: SizedModel, new: SizedModel) -> dict[str, TensorMap] | None:
    """Return the map of each weight whose axes grow by whole ratios: each value is repeated next to itself."""
    sizes = {}
    for name, shape in new.shapes.items():
        axes, divisor = [], 1.0
        for before, after, role in zip(old.shapes[name], shape, new.roles(name), strict=True):
            if after % before:
                return None
            axes.append(axis_of(AxisFactor(before, before), AxisFactor(1, after // before)))
            divisor *= after / before if role == "read" else 1
        sizes[name] = TensorMap(name, tuple(axes), divisor=divisor)
    return sizes


def sizes_of(old: SizedModel, new: SizedModel, fields: Mapping[str, tuple[int, int]]) -> dict[str, SizeChange]:
    """Return the size that changes for each weight that grows.

    It is a size of a component around the weight or, for a weight that components share, the size in `fields`.
    """
    sizes = {}
    for name, shape in new.shapes.items():
        if old.shapes.get(name) == shape:
            continue
        for before, after in zip(old.configs(name), new.configs(name), strict=True):
            values, after_values = dict(before), dict(after)
            changes = [
                (values[key], after_values[key])
                for key in fields
                if key in after_values and type(values.get(key)) is int and values[key] != after_values[key]
            ]
            if changes:
                groups = [value for key, value in after_values.items() if type(value) is int and key not in fields]
                sizes[name] = SizeChange(*_fitting(changes, old.shapes[name], shape), tuple(groups))
                break
        else:
            sizes[name] = SizeChange(*_fitting([*fields.values()], old.shapes[name], shape))
    return sizes


def _fitting(changes: Sequence[tuple[int, int]], old: Sequence[int], new: Sequence[int]) -> tuple[int, int]:
    """Return the first size that grows by the same ratio as an axis; else the first size."""
    pairs = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    return next((change for change in changes if any(change[0] * b == change[1] * a for a, b in pairs)), changes[0])

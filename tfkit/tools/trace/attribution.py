"""Attribution: the effect of each value inside a model, at each layer and position, on a metric of the output."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.arguments import checked, value_text
from tfkit.building.model import BuiltModel, unwrapped_model
from tfkit.tools.common.heat_map import HeatMap, heat_map_picture
from tfkit.tools.show.points import TracePoint
from tfkit.tools.trace.interventions import Inputs, call_model, matching_points, values_of
from tfkit.tools.trace.trace import Hook, registered_hooks, trace


@dataclass(frozen=True)
class Attribution:
    """The changes of a metric when a value at one position is replaced by its value for different inputs.

    Attributes:
        effects: the change at each position, [t], by name of the value.
        before: the metric for the original inputs.
        source: the metric for the inputs whose values are used.
    """

    effects: Mapping[str, Tensor]
    before: float
    source: float

    def __str__(self) -> str:
        """Return a table with a row for each name and a column for each position."""
        width = max(map(len, self.effects))
        columns = range(max(map(len, self.effects.values())))
        rows = {name: "".join(f"{x:>10.3g}" for x in effects.tolist()) for name, effects in self.effects.items()}
        lines = [f"{'':{width}}" + "".join(f"{position:>10}" for position in columns)]
        lines += [f"{name:{width}}{row}" for name, row in rows.items()]
        return "\n".join(lines)

    def to_svg(self) -> str:
        """Return a heat map: red where the metric rises, blue where it falls."""
        rows = [row.tolist() for row in self.effects.values()]
        columns = [str(position) for position in range(max(map(len, rows)))]
        title = f"change of the metric from {self.before:.4g}; {self.source:.4g} for the other inputs"
        return heat_map_picture(title, [HeatMap(title, rows, list(self.effects), columns)], per_line=1, square=False)

    def _repr_svg_(self) -> str:
        return self.to_svg()


@checked
def attribution(
    model: BuiltModel,
    names: str | Collection[str],
    inputs: Tensor | Mapping[str, Tensor],
    source: Tensor | Mapping[str, Tensor],
    metric: Callable[..., Any],
    *,
    gradient: bool = False,
) -> Attribution:
    """Return the change of a metric when each value is replaced, at one position, by its value for different inputs.

        effects = tfkit.attribution(model, "decoder.layers.*.stream.out", tokens, other, lambda y: y[0, -1, 42])
        print(effects)
        Path("effects.svg").write_text(effects.to_svg())

    The model runs in its mode, once for each name and position at which the values differ. Call `model.eval()` first to
    leave out dropout.

    Args:
        model: a model that `tfkit.build` returned, or a wrapper of it.
        names: names of values of layers, as in `tfkit.trace`; `attention.heads.*` is each head.
        inputs: the inputs of the model: its first input, or inputs by name.
        source: inputs of the same sizes, whose values are used.
        metric: a function of the model's output that returns one number.
        gradient: estimate the changes from the gradient of the metric, with a single backward for all values.

    Returns:
        The changes of the metric, as a table (`print`) and a picture (`to_svg`).

    Raises:
        ValueError: a name does not exist, its values have no positions, or `inputs` and `source` differ in size.
    """
    built = unwrapped_model(model)
    points = matching_points(built, names)
    if without := [point.name for point in points if point.layer is None or point.position_axis is None]:
        raise ValueError(f"`{without[0]}` must be a value of a layer, with positions")
    with torch.no_grad():
        values, replacements = values_of(built, points, inputs), values_of(built, points, source)
        before, after = (_metric_number(metric(call_model(built, of))) for of in (inputs, source))
    for name, value in values.items():
        if value.shape != replacements[name].shape:
            sizes = f"{[*value.shape]} and {[*replacements[name].shape]}"
            raise ValueError(f"`inputs` and `source` must have the same sizes; the sizes of `{name}` are {sizes}")
    effects = {}
    gradients = _metric_gradients(built, points, inputs, metric) if gradient else {}
    for point in points:
        new = replacements[point.name]
        changes = new - values[point.name]
        if gradient:
            effects[point.name] = _by_position(point, changes * gradients[point.name]).sum(1)
        else:
            differs = _by_position(point, changes != 0).any(1).tolist()
            effects[point.name] = _position_effects(built, point, new, differs, inputs, metric)
    return Attribution(effects, float(before), float(after))


def _by_position(point: TracePoint, value: Tensor) -> Tensor:
    """Arrange a value as [t, all other axes]."""
    assert point.position_axis is not None
    return value.movedim(point.position_axis, 0).flatten(1)


def _position_effects(
    model: fx.GraphModule,
    point: TracePoint,
    new: Tensor,
    differs: list[bool],
    inputs: Inputs,
    metric: Callable[..., Any],
) -> Tensor:
    """Return the change of the metric for each position of one value."""
    with torch.no_grad():
        # The same attention backend as below, so that rounding differences do not appear as effects.
        with registered_hooks(model, [Hook(point)]):
            before = _metric_number(metric(call_model(model, inputs)))
        effects = [torch.zeros_like(before) for _ in differs]
        for position in (position for position, change in enumerate(differs) if change):
            with registered_hooks(model, [Hook(point, new, (position,))]):
                effects[position] = _metric_number(metric(call_model(model, inputs))) - before
    return torch.stack(effects)


def _metric_gradients(
    model: fx.GraphModule, points: Collection[TracePoint], inputs: Inputs, metric: Callable[..., Any]
) -> dict[str, Tensor]:
    """Return the gradient of the metric with respect to each value."""
    names = [point.name for point in points]
    with torch.enable_grad(), trace(model, read=names, write=dict.fromkeys(names, _with_gradient)) as values:
        number = _metric_number(metric(call_model(model, inputs)))
    if not number.requires_grad:
        raise ValueError("`metric` must be differentiable: return a tensor that was computed from the output")
    gradients = torch.autograd.grad(number, [*values.values()], allow_unused=True, materialize_grads=True)
    return dict(zip(values, gradients, strict=True))


def _with_gradient(value: Tensor) -> Tensor:
    """Return the value with a gradient, even if all parameters are frozen."""
    return value if value.requires_grad else value.requires_grad_()


def _metric_number(value: Any) -> Tensor:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = torch.tensor(float(value))
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(f"`metric` must return one number; got {value_text(value)}")
    return value.reshape(())

"""Interventions on values inside a model: replacement by zero, a mean or values of other inputs, and steering."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from tfkit.arguments import checked
from tfkit.building.model import BuiltModel, unwrapped_model
from tfkit.tools.show.points import TracePoint
from tfkit.tools.trace.trace import Edit, named_points, trace

Inputs: TypeAlias = Tensor | Mapping[str, Tensor]
"""The first input of a model, or its inputs by name."""


@checked
def ablate(
    model: BuiltModel,
    names: str | Collection[str],
    *,
    mean: Mapping[str, Tensor | list[Tensor]] | None = None,
    positions: int | Collection[int] | None = None,
) -> AbstractContextManager[dict[str, Any]]:
    """Return a context in which values inside the model are replaced by zero, or by the mean of recorded values.

        with tfkit.ablate(model, ["decoder.layers.1.attention.heads.2", "decoder.layers.3.ffn.out"]):
            model(tokens)

    The change affects outputs, gradients and each step of `generate`.

    Args:
        model: a model that `tfkit.build` returned, or a wrapper of it.
        names: names of values, as in `tfkit.trace`: of sublayers (`ffn.out`), heads (`attention.heads.2`) or neurons
            (`ffn.hidden.17`).
        mean: values that `tfkit.trace` read under these names, from sequences without padding. The replacement is their
            mean over sequences, positions and calls; by default it is zero.
        positions: the positions that change, as in `tfkit.trace`; by default all.

    Returns:
        A context, as of `tfkit.trace`.

    Raises:
        ValueError: a name does not exist, or `mean` does not contain its values.
    """
    edits: dict[str, Edit] = {}
    for point in matching_points(unwrapped_model(model), names):
        edits[point.name] = torch.zeros_like if mean is None else partial(_expanded_mean, _recorded_mean(point, mean))
    return trace(model, write=edits, positions=positions)


def _recorded_mean(point: TracePoint, values: Mapping[str, Tensor | list[Tensor]]) -> Tensor:
    """Return the mean of values over sequences, positions and calls, whose axes have size 1."""
    if point.name not in values:
        raise ValueError(f"`mean` must contain `{point.name}`: read the names that are ablated")
    value, axis = values[point.name], point.position_axis
    runs = value if isinstance(value, list) else [value]
    if not runs or not all(_has_shape(run, point) for run in runs):
        got = ", ".join(str([*run.shape]) for run in runs) or "an empty list"
        raise ValueError(f"`mean` must contain `{point.name}` with the sizes {point.shape}; got {got}")
    if point.sizes.count("t") + point.sizes.count("k") > 1 or not all(run.is_floating_point() for run in runs):
        raise ValueError(f"`{point.name}` has no mean: ablate it to zero, or write it with `tfkit.trace`")
    if axis is None:
        return torch.cat(runs).mean(0, keepdim=True)
    return torch.cat([run.movedim(axis, 1).flatten(0, 1) for run in runs]).mean(0)[None].unsqueeze(axis)


def _has_shape(value: Tensor, point: TracePoint) -> bool:
    """Return True if a value has the axes of a point, and the sizes that its shape has as numbers."""
    if "..." in point.sizes:
        return True
    pairs = zip(point.sizes, value.shape, strict=False)
    return value.dim() == len(point.sizes) and all(str(n) == size for size, n in pairs if size.isdecimal())


def _expanded_mean(mean: Tensor, value: Tensor) -> Tensor:
    return mean.to(value).expand_as(value)


@checked
def patch(
    model: BuiltModel,
    names: str | Collection[str],
    source: Tensor | Mapping[str, Tensor],
    *,
    positions: int | Collection[int] | None = None,
) -> AbstractContextManager[dict[str, Any]]:
    """Return a context in which values inside the model are replaced by its values for different inputs.

        with tfkit.patch(model, "decoder.layers.3.stream.out", other_tokens, positions=[4]):
            model(tokens)

    The model runs once with `source`, in its mode, before the function returns. Gradients also flow to this run. The
    change affects outputs, gradients and each step of `generate`, which uses the values of a position in the step that
    reads it.

    Args:
        model: a model that `tfkit.build` returned, or a wrapper of it.
        names: names of values, as in `tfkit.trace`.
        source: the inputs whose values are used: the first input of the model, or inputs by name. Their sizes must
            equal the sizes of the inputs in the context.
        positions: the positions that change, as in `tfkit.trace`; by default all.

    Returns:
        A context, as of `tfkit.trace`.

    Raises:
        ValueError: a name does not exist, or its layer runs several times.
    """
    built = unwrapped_model(model)
    values = values_of(built, matching_points(built, names), source)
    return trace(model, write=values, positions=positions)


def matching_points(model: fx.GraphModule, names: str | Collection[str]) -> list[TracePoint]:
    """Return the points that match the names. Raise ValueError for a name without matches, and for an empty list."""
    if not names:
        raise ValueError("`names` must contain the name of a value")
    return [point for points in named_points(model, names).values() for point in points]


def values_of(model: fx.GraphModule, points: Collection[TracePoint], inputs: Inputs) -> dict[str, Tensor]:
    """Run the model and return the values of `points`. Raise ValueError if a layer runs several times."""
    with trace(model, read=[point.name for point in points]) as values:
        call_model(model, inputs)
    for name, value in values.items():
        if isinstance(value, list):
            raise ValueError(f"`{name}` cannot be patched: its layer runs {len(value)} times")
    return values


def call_model(model: fx.GraphModule, inputs: Inputs) -> Any:
    """Call a model with its first input, or with inputs by name."""
    return model(inputs) if isinstance(inputs, Tensor) else model(**inputs)


@checked
def steer(
    model: BuiltModel,
    names: str | Collection[str],
    vector: Tensor,
    *,
    positions: int | Collection[int] | None = None,
) -> AbstractContextManager[dict[str, Any]]:
    """Return a context in which a vector is added to values inside the model.

        with tfkit.steer(model, "decoder.layers.3.stream.out", 4 * direction, positions=-1):
            tfkit.generate(model, tokens, max_new_tokens=20)

    The change affects outputs, gradients, also the gradient of the vector, and each step of `generate`.

    Args:
        model: a model that `tfkit.build` returned, or a wrapper of it.
        names: names of values, as in `tfkit.trace`.
        vector: as wide as the values, [width]. A single channel (`ffn.hidden.17`) takes a tensor without axes.
        positions: the positions that change, as in `tfkit.trace`; by default all.

    Returns:
        A context, as of `tfkit.trace`.

    Raises:
        ValueError: a name does not exist, or the vector does not have the width of a value.
    """
    edits: dict[str, Edit] = {}
    for point in matching_points(unwrapped_model(model), names):
        channel = point.unit is not None and point.unit[0] == len(point.sizes)
        expected = [] if channel else point.sizes[-1:]
        if [str(size) for size in vector.shape] != expected:
            raise ValueError(f"the vector for `{point.name}` must be [{', '.join(expected)}]; got {[*vector.shape]}")
        edits[point.name] = partial(_steered_value, vector)
    return trace(model, write=edits, positions=positions)


def _steered_value(vector: Tensor, value: Tensor) -> Tensor:
    return value + vector.to(value)

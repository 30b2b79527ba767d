"""Flow matching: the inputs of a model that predicts velocities, and samples along these velocities.

Between an example x_0 and noise e lie the points x_s = (1 - s) x_0 + s e, with a level s from 0, the example, to 1, the
noise. The model predicts their velocity dx/ds = e - x_0. s is the time of Esser et al.,
https://arxiv.org/abs/2403.03206; Lipman et al., https://arxiv.org/abs/2210.02747, have t = 1 - s.
Guidance without a classifier: https://arxiv.org/abs/2207.12598.

b rows, n classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor, nn

from tfkit.arguments import INT64, Limit, Positive, Seed, checked
from tfkit.building.builder import evaluation_mode, graph_of
from tfkit.building.initialize import generator_of
from tfkit.building.model import BuiltModel, check_values
from tfkit.component import Signal
from tfkit.errors import listing

Method: TypeAlias = Literal["euler", "heun"]
PERIOD = 10_000.0
"""The longest period of the features of a time, divided by 2 pi."""


@checked
@dataclass(frozen=True)
class FlowModel:
    """A model that predicts velocities, with the names of its inputs; `x` is its only further input.

    Args:
        model: the result of `build`, whose single output has the shape of `x`.
        time: the input that takes the level times `scale`: a vector of width 1, or of cosines and sines of all
            frequencies from 1 to 1 / 10,000, as in DiT (https://arxiv.org/abs/2212.09748).
        label: the input that takes the class, a vector with a 1 at the class; zeros stand for no class.
        scale: the time at level 1.

    Raises:
        ValueError: the model does not have such inputs, or its output has another shape.
    """

    model: BuiltModel
    time: str = "time"
    label: str | None = None
    scale: Annotated[float, Limit(above=0)] = 1000.0

    def __post_init__(self) -> None:
        inputs, graph = self._inputs, graph_of(self.module)
        named = [name for name in (self.time, self.label) if name is not None]
        for name in named:
            if name not in inputs or inputs[name].type != "vector":
                words = inputs[name].in_words() if name in inputs else f"the inputs {listing(inputs)}"
                raise ValueError(f"`{name}` must be an input of the model that takes a vector; got {words}")
        if len(inputs) != len(named) + 1:
            raise ValueError(f"a flow must have one input in addition to {listing(named)}; got {listing(inputs)}")
        x, outputs = inputs[self.x], graph.outputs
        output = graph.node(outputs[0]).output
        sizes = [(signal.type, signal.channels, signal.rows, signal.width) for signal in (x, output)]
        if len(outputs) > 1 or sizes[0] != sizes[1]:
            words = f"{len(outputs)} outputs" if len(outputs) > 1 else output.in_words()
            raise ValueError(f"the model must return one velocity for `{self.x}`, {x.in_words()}; got {words}")
        width = inputs[self.time].width or 0
        if width % 2 and width > 1:
            raise ValueError(f"the width of `{self.time}` must be 1 or even: cosines and sines; got {width}")

    @property
    def module(self) -> nn.Module:
        """The model as a module."""
        assert isinstance(self.model, nn.Module)
        return self.model

    @cached_property
    def _inputs(self) -> dict[str, Signal]:
        return {name: signal for name, signal in graph_of(self.module).inputs.items() if not signal.optional}

    @cached_property
    def x(self) -> str:
        """The input that takes the points x_s."""
        return next(name for name in self._inputs if name not in (self.time, self.label))

    @property
    def signal(self) -> Signal:
        """The type and the sizes of `x`."""
        return self._inputs[self.x]

    @property
    def n_classes(self) -> int:
        """The number of classes that the model takes."""
        return 0 if self.label is None else self._inputs[self.label].width or 0

    def velocities(self, x: Tensor, levels: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the velocities at points x [b, ...] of the levels [b], in at least float32.

        Args:
            x: the points.
            levels: from 0 to 1.
            labels: the class of each row, [b], int64; negative for no class, which is the default.
            mask: the padding mask of `x`, [b, t].
        """
        dtype = next(self.module.parameters()).dtype
        times = self._times(levels.to(torch.promote_types(dtype, torch.float32)))
        arguments = {self.x: x.to(dtype), self.time: times.to(dtype)}
        if self.label is not None:
            labels = torch.full_like(levels, -1, dtype=torch.int64) if labels is None else labels
            classes = torch.arange(self.n_classes, device=x.device)
            arguments[self.label] = (labels[:, None] == classes).to(dtype)
        if mask is not None:
            arguments[str(self.signal.mask)] = mask
        velocities: Tensor = self.module(**arguments)
        if velocities.shape != x.shape:
            got = f"{list(velocities.shape)} for {list(x.shape)}"
            raise ValueError(f"the model must return a velocity for each number of `{self.x}`; got {got}")
        return velocities.to(torch.promote_types(velocities.dtype, torch.float32))

    def _times(self, levels: Tensor) -> Tensor:
        """Return the times of levels [b], or their cosines and sines: [b, width]."""
        times, half = self.scale * levels[:, None], (self._inputs[self.time].width or 0) // 2
        if not half:
            return times
        indices = torch.arange(half, device=levels.device, dtype=levels.dtype)
        frequencies = torch.exp(-math.log(PERIOD) / half * indices)
        return torch.cat([(times * frequencies).cos(), (times * frequencies).sin()], dim=-1)


@checked
def sample_flow(
    flow: FlowModel,
    n_samples: Annotated[int, Limit(minimum=1, maximum=1_000_000)],
    *,
    steps: Annotated[int, Limit(minimum=1, maximum=100_000)] = 50,
    method: Method = "euler",
    labels: Sequence[Annotated[int, INT64]] | None = None,
    guidance: Annotated[float, Limit(minimum=0, maximum=1000)] = 1.0,
    length: Positive | None = None,
    seed: Seed = 0,
) -> Tensor:
    """Return samples [n_samples, ...]: noise that follows the velocities of a model from level 1 to level 0.

    Samples are in float32, or in float64 for a model in float64. All steps are equally long. The noise of a sample
    depends only on the seed and its index.

    Args:
        flow: the model, without dropout even if it is in train mode.
        n_samples: the number of samples.
        steps: the number of steps.
        method: euler calls the model once in each step; heun calls it again at the end of the step, and takes the mean
            of both velocities.
        labels: the class of each sample, for a model that takes classes; by default, no class.
        guidance: the weight w in v(no class) + w (v(class) - v(no class)). Values above 1 favor typical members of the
            class, and call the model on twice as many rows. The model must have been trained without a class, too.
        length: the number of positions of a sample, if the input `x` of the model has no fixed length.
        seed: the start of the random numbers.

    Raises:
        TypeError: an argument is unknown, or of another type.
        ValueError: labels are not classes of the model, their number is not `n_samples`, an argument has no effect or
            is missing, or the samples are not finite.
    """
    _check_labels(flow, n_samples, labels, guidance)
    check_values(flow.module)
    shape = _shape(flow.signal, length)
    device = next(flow.module.parameters()).device
    noise = [torch.randn(shape, generator=generator_of(seed, f"flow/{row}", "cpu")) for row in range(n_samples)]
    x = torch.stack(noise).to(device)
    classes = None if labels is None else torch.tensor(labels, device=device)

    def velocities(x: Tensor, level: float) -> Tensor:
        levels = torch.full((len(x),), level, device=device, dtype=x.dtype)
        if classes is None or guidance == 1:
            return flow.velocities(x, levels, classes)
        none = torch.full_like(classes, -1)
        both = flow.velocities(torch.cat([x, x]), torch.cat([levels, levels]), torch.cat([classes, none]))
        of_class, of_none = both.chunk(2)
        return of_none + guidance * (of_class - of_none)

    with torch.no_grad(), evaluation_mode(flow.module):
        for step in range(steps):
            level, following = 1 - step / steps, 1 - (step + 1) / steps
            change = following - level
            velocity = velocities(x, level)
            if method == "heun":
                velocity = (velocity + velocities(x + change * velocity, following)) / 2
            x = x + change * velocity
    if not bool(x.isfinite().all()):
        raise ValueError("the samples are not finite: take more steps, or a lower guidance")
    return x


def _check_labels(flow: FlowModel, n_samples: int, labels: Sequence[int] | None, guidance: float) -> None:
    if labels is None:
        if guidance != 1:
            raise ValueError("`guidance` must be combined with `labels`: it has no effect without classes")
    elif len(labels) != n_samples or not all(0 <= label < flow.n_classes for label in labels):
        words = f"`labels` must be {n_samples} classes below {flow.n_classes}"
        raise ValueError(f"{words}; got {listing(map(str, labels)) or 'none'}")


def _shape(x: Signal, length: int | None) -> tuple[int, ...]:
    """Return the shape of a sample; raise `ValueError` unless its length is known from exactly one source."""
    sizes = [size for size in (x.channels, x.rows, x.width) if size is not None]
    if x.type != "sequence":
        if length is not None:
            raise ValueError(f"`length` has no effect: the model takes {x.in_words()}")
        return (*sizes,)
    if (length is None) == (x.length is None):
        reason = "is missing: the samples can have any length" if length is None else "has no effect"
        raise ValueError(f"`length` {reason}; the model takes {x.in_words()}")
    return (length or x.length or 0, *sizes)

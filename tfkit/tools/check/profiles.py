"""Traces that training leaves in the weights of a layer, and edits that bring a lost one back.

Two matrices with units between them can trade a factor: rows of `up` times c, columns of `down` through c, and all
stays. Training keeps the difference of their squares, and decay makes it small: a unit that is large on one side is
large on the other. So it is with queries and keys, values and `output`, a norm and what reads it. In a GLU, units of
`up` may change their sign together with units of `down`, and share no direction; units of `gate` share a direction.

Balance: https://arxiv.org/abs/1806.00900.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, TypeAlias

import torch
from torch import Tensor

LAYERS = 4
"""Layers that it takes to know what is usual."""
MATCH, SIGMAS = 0.3, 3.5
"""The least median of a trace over layers, as a correlation and in standard deviations of chance."""
LEAN = 0.4
"""The least median of the lean of a gate, as a logarithm."""
LOST, BACK = 0.4, 0.6
"""Parts of the median: a trace below the first is lost, one above the second is there."""
LEAST = 1e-12

Axis = Literal["rows", "columns"]


@dataclass(frozen=True)
class Profile:
    """A tensor of a layer, as far as traces are concerned.

    Attributes:
        shape: its shape.
        rows: the norm of each row; of a vector, each absolute value.
        columns: the norm of each column; of a vector, each absolute value.
        lean: the square of the sum of all rows, in squares of rows: 1 if they have no direction in common.
        turned: the same of columns.
    """

    shape: torch.Size
    rows: Tensor
    columns: Tensor
    lean: float = 1.0
    turned: float = 1.0

    @classmethod
    def of(cls, tensor: Tensor) -> Profile:
        """Return the profile of a vector or a matrix."""
        tensor = tensor.detach().float()
        if tensor.dim() == 1:
            return cls(tensor.shape, tensor.abs(), tensor.abs())
        total = tensor.square().sum().clamp(min=LEAST)
        lean, turned = (float(tensor.sum(axis).square().sum() / total) for axis in (0, 1))
        return cls(tensor.shape, tensor.norm(dim=1), tensor.norm(dim=0), lean, turned)

    @property
    def square(self) -> bool:
        """True for a matrix that could be transposed unseen."""
        return len(self.shape) == 2 and self.shape[0] == self.shape[1]

    def units(self, axis: Axis) -> Tensor:
        """Return the norms along an axis."""
        return self.rows if axis == "rows" else self.columns

    def transposed(self) -> Profile:
        """Return the profile of the transposed matrix."""
        return Profile(self.shape, self.columns, self.rows, self.turned, self.lean)


Parts: TypeAlias = Mapping[str, Profile]
"""The tensors of a layer, by their paths in it."""


@dataclass(frozen=True)
class Trace:
    """A relation between two tensors of a layer: the norms of units that both have, or the lean of a gate.

    Attributes:
        first: a tensor, by its path in the layer.
        second: a second tensor.
        axes: the axes of the units, `rows` or `columns` of both tensors; None compares leans.
        group: channels of `first` for one channel of `second`: the channels of this many heads of this width.
        stream: true if the units are channels of the residual stream, which all layers have in common.
    """

    first: str
    second: str
    axes: tuple[Axis, Axis] | None
    group: tuple[int, int] = (1, 1)
    stream: bool = False

    def scores(self, layers: Sequence[Parts]) -> Tensor:
        """Return the strength of the trace in each layer."""
        if self.axes is None:
            return torch.tensor([layer[self.first].lean / layer[self.second].lean for layer in layers]).log()
        first = [self._grouped(layer[self.first].units(self.axes[0])) for layer in layers]
        second = [layer[self.second].units(self.axes[1]) for layer in layers]
        return (self._centred(first) * self._centred(second)).sum(dim=1)

    def least(self, layer: Parts) -> float:
        """Return the minimum strength for the trace to be informative."""
        return LEAN if self.axes is None else max(MATCH, SIGMAS / len(layer[self.second].units(self.axes[1])) ** 0.5)

    def _grouped(self, norms: Tensor) -> Tensor:
        heads, width = self.group
        return norms if heads == 1 else norms.view(-1, heads, width).norm(dim=1).flatten()

    def _centred(self, norms: Sequence[Tensor]) -> Tensor:
        """Return logarithms of length 1, without the mean over units or over layers."""
        logarithms = torch.stack([*norms]).clamp(min=LEAST).log()
        if self.stream:
            logarithms = logarithms - logarithms.mean(dim=0)
        logarithms = logarithms - logarithms.mean(dim=1, keepdim=True)
        return logarithms / logarithms.norm(dim=1, keepdim=True).clamp(min=LEAST)


# ---- edits ----


@dataclass(frozen=True)
class Edit:
    """Two tensors that are exchanged, each by its layer and its path there; one that is transposed, if they are one."""

    first: tuple[int, str]
    second: tuple[int, str]

    def changes(self, trace: Trace, layer: int) -> bool:
        """Return True if the trace of that layer is between other tensors after it."""
        return not {(layer, trace.first), (layer, trace.second)}.isdisjoint((self.first, self.second))

    def of(self, layers: Sequence[Parts]) -> list[Parts]:
        """Return the layers after it."""
        edited = [dict(layer) for layer in layers]
        (a, first_name), (b, second_name) = self.first, self.second
        if self.first == self.second:
            edited[a][first_name] = layers[a][first_name].transposed()
        else:
            edited[a][first_name], edited[b][second_name] = layers[b][second_name], layers[a][first_name]
        return [*edited]


def _edits(layers: Sequence[Parts], suspects: Sequence[int]) -> Iterator[Edit]:
    """Yield every edit of these layers that keeps all shapes."""
    for number in suspects:
        layer = layers[number]
        yield from (Edit((number, name), (number, name)) for name, item in layer.items() if item.square)
        for item, two in combinations(layer, 2):
            if layer[item].shape == layer[two].shape:
                yield Edit((number, item), (number, two))
    for a, b in combinations(suspects, 2):
        yield from (Edit((a, name), (b, name)) for name in layers[a])


@dataclass(frozen=True)
class Misplaced:
    """The traces of some layers.

    Attributes:
        speaking: the number of traces that say something.
        edits: the edits that bring back what is lost, the best first.
    """

    speaking: int
    edits: tuple[Edit, ...] = ()


def misplaced(layers: Sequence[Parts], traces: Sequence[Trace]) -> Misplaced:
    """Find the edits of equal layers that restore lost traces, and lose none."""
    usual: dict[Trace, float] = {}
    for trace in traces if len(layers) >= LAYERS else ():
        median = float(trace.scores(layers).sort().values[len(layers) // 2])
        if median >= trace.least(layers[0]):
            usual[trace] = median
    before = _strengths(layers, usual)
    suspects = [number for number, lost in enumerate((before < LOST).any(dim=0).tolist()) if lost] if usual else []
    edits: list[tuple[float, Edit]] = []
    for edit in _edits(layers, suspects):
        touched = torch.tensor([[edit.changes(trace, number) for number in range(len(layers))] for trace in usual])
        after, lost = _strengths(edit.of(layers), usual), touched & (before < LOST)
        everywhere = torch.equal(lost.any(dim=0), touched.any(dim=0))
        if (
            lost.any()
            and everywhere
            and (after[lost] > BACK).all()
            and (after >= before.clamp(max=BACK))[touched].all()
        ):
            edits.append((float((after - before).sum()), edit))
    edits.sort(key=lambda item: -item[0])
    return Misplaced(len(usual), tuple(edit for _, edit in edits))


def _strengths(layers: Sequence[Parts], usual: Mapping[Trace, float]) -> Tensor:
    """Return the strength of each trace in each layer, relative to the usual strength."""
    return torch.stack([trace.scores(layers) / median for trace, median in usual.items()] or [torch.ones(len(layers))])

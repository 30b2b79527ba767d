"""A property of trained weights: the traces of training show that no tensor was exchanged or transposed.

A factor c can move between two matrices that share hidden units: if rows of `up` are multiplied by c and columns of
`down` divided by c, the outputs do not change. Training conserves the difference of the squared norms, and decay makes
it small. A unit whose norm is large on one side is therefore large on the other side. The same holds for queries and
keys, for values and `output`, and for a norm and the matrices after it. In a GLU, units of `up` may change their sign
together with units of `down`, and share no direction; units of `gate` share a direction.

Balance: https://arxiv.org/abs/1806.00900.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from tfkit.checkpoint.weight_map import tensor_locations_of
from tfkit.component import AttentionConfig, Layer, Step
from tfkit.tools.check.measure import Deviation, property_of, require
from tfkit.tools.check.model_under_test import ModelUnderTest

LAYERS = 4
"""Minimum number of layers from which the usual strength of a trace is estimated."""
MATCH, SIGMAS = 0.3, 3.5
"""Smallest informative median of a trace over layers: as a correlation, and in standard deviations of chance."""
LEAN = 0.4
"""Smallest informative median of the lean of a gate, as a logarithm."""
LOST, BACK = 0.4, 0.6
"""Fractions of the median: a trace below the first is lost, a trace above the second is present."""
EPSILON = 1e-12

Axis = Literal["rows", "columns"]


@property_of("locations", "has its tensors in the locations of their training")
def tensor_locations(subject: ModelUnderTest) -> Iterator[Deviation]:
    """No tensor is transposed or exchanged for a different tensor, as far as the traces of training can show."""
    require(subject.module is None, "the weights come from no file")
    require(subject.weights is not None, "the weights are random")
    tensors = {
        name: location.view(subject.model.state_dict()) for name, location in tensor_locations_of(subject.model).items()
    }
    informative = 0
    for node in subject.graph.built_nodes:
        for layers, traces in _equal_layers(node.name, node.stack.layers if node.stack else (), tensors):
            usual = _usual_strengths([*layers.values()], traces)
            informative += len(usual)
            edits = _restoring_edits([*layers.values()], usual) if usual else []
            if edits:
                paths = [*layers]
                detail = ", or ".join(edit.description(paths) for edit in edits)
                where = paths[edits[0].first[0]]
                yield Deviation.fault(f"{detail}: undone, its units have the sizes of training again", where)
    require(informative, f"no {LAYERS} identical layers show effects of training")
    yield Deviation(0.0, "")


# ---- traces ----


@dataclass(frozen=True)
class TensorNorms:
    """The norms of a tensor of a layer, and the common directions of its rows and columns.

    Attributes:
        shape: its shape.
        rows: the norm of each row; of a vector, each absolute value.
        columns: the norm of each column; of a vector, each absolute value.
        lean: the squared norm of the sum of all rows, over the sum of their squared norms; 1 if they share none.
        turned: the same for columns.
    """

    shape: torch.Size
    rows: Tensor
    columns: Tensor
    lean: float = 1.0
    turned: float = 1.0

    @classmethod
    def of(cls, tensor: Tensor) -> TensorNorms:
        """Return the norms of a vector or a matrix."""
        tensor = tensor.detach().float()
        if tensor.dim() == 1:
            return cls(tensor.shape, tensor.abs(), tensor.abs())
        total = tensor.square().sum().clamp(min=EPSILON)
        lean, turned = (float(tensor.sum(axis).square().sum() / total) for axis in (0, 1))
        return cls(tensor.shape, tensor.norm(dim=1), tensor.norm(dim=0), lean, turned)

    def units(self, axis: Axis) -> Tensor:
        """Return the norms along an axis."""
        return self.rows if axis == "rows" else self.columns

    def transposed(self) -> TensorNorms:
        """Return the norms of the transposed matrix."""
        return TensorNorms(self.shape, self.columns, self.rows, self.turned, self.lean)


LayerNorms: TypeAlias = Mapping[str, TensorNorms]
"""The tensors of a layer, by their paths in it."""


@dataclass(frozen=True)
class TrainingTrace:
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

    def strengths(self, layers: Sequence[LayerNorms]) -> Tensor:
        """Return the strength of the trace in each layer."""
        if self.axes is None:
            return torch.tensor([layer[self.first].lean / layer[self.second].lean for layer in layers]).log()
        first = [layer[self.first].units(self.axes[0]) for layer in layers]
        heads, width = self.group
        if heads > 1:
            first = [norms.view(-1, heads, width).norm(dim=1).flatten() for norms in first]
        second = [layer[self.second].units(self.axes[1]) for layer in layers]
        return (self._centred(first) * self._centred(second)).sum(dim=1)

    def threshold(self, layer: LayerNorms) -> float:
        """Return the minimum strength for the trace to be informative."""
        return LEAN if self.axes is None else max(MATCH, SIGMAS / len(layer[self.second].units(self.axes[1])) ** 0.5)

    def _centred(self, norms: Sequence[Tensor]) -> Tensor:
        """Return the logarithms of norms, centred over units and over layers, and scaled to length 1."""
        logarithms = torch.stack([*norms]).clamp(min=EPSILON).log()
        if self.stream:
            logarithms = logarithms - logarithms.mean(dim=0)
        logarithms = logarithms - logarithms.mean(dim=1, keepdim=True)
        return logarithms / logarithms.norm(dim=1, keepdim=True).clamp(min=EPSILON)


def _equal_layers(
    node: str, layers: Sequence[Layer], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[dict[str, LayerNorms], tuple[TrainingTrace, ...]]]:
    """Yield the layers of a stack that have equal traces and shapes, by their paths, and these traces."""
    groups: dict[Any, dict[str, LayerNorms]] = {}
    for number, layer in enumerate(layers):
        path = f"{node}.layers.{number}."
        inside = {name.removeprefix(path): item for name, item in tensors.items() if name.startswith(path)}
        traces = tuple(
            item
            for step in layer.steps
            for item in _sublayer_traces(step)
            if inside.keys() >= {item.first, item.second}
        )
        offsets = {  # numbers that norms add to their weights
            _norm_weight(step): dict((layer.input_norm if step.reads_input else step.norm_in) or ()).get("offset", 0)
            for step in layer.steps
        }
        names = dict.fromkeys(name for item in traces for name in (item.first, item.second))
        norms = {name: TensorNorms.of(inside[name] + offsets.get(name, 0)) for name in names}
        groups.setdefault((traces, tuple(item.shape for item in norms.values())), {})[path.rstrip(".")] = norms
    for (traces, _), group in groups.items():
        yield group, traces


def _sublayer_traces(step: Step) -> Iterator[TrainingTrace]:
    """Yield the traces of a sublayer, if its tensors have the names of tfkit's components."""
    path = step.name
    if isinstance(step.config, AttentionConfig):
        q, k, v, o = (f"{path}.{name}.weight" for name in ("project.q", "project.k", "project.v", "output"))
        group = step.config.n_heads // step.config.kv_heads, step.config.head_width
        yield TrainingTrace(q, k, ("rows", "rows"), group)
        yield TrainingTrace(o, v, ("columns", "rows"), group)
        readers = [q] if step.reads_memory else [q, k, v]
    else:
        gate, up, down = (f"{path}.{name}.weight" for name in ("gate", "up", "down"))
        readers = [gate, up]
        yield from (TrainingTrace(name, down, ("rows", "columns")) for name in readers)
        yield TrainingTrace(gate, up, None)
    yield from (TrainingTrace(_norm_weight(step), name, ("rows", "columns"), stream=True) for name in readers)


def _norm_weight(step: Step) -> str:
    """Return the weight of the norm whose output a sublayer takes."""
    return "input_norm.weight" if step.reads_input else f"{step.name}_norm_in.weight"


# ---- edits ----


@dataclass(frozen=True)
class Edit:
    """An exchange of two tensors, each by its layer and its path there; a transposition if both are the same tensor."""

    first: tuple[int, str]
    second: tuple[int, str]

    def of(self, layers: Sequence[LayerNorms]) -> list[LayerNorms]:
        """Return the layers after the edit."""
        edited = [dict(layer) for layer in layers]
        (a, first_name), (b, second_name) = self.first, self.second
        if self.first == self.second:
            edited[a][first_name] = layers[a][first_name].transposed()
        else:
            edited[a][first_name], edited[b][second_name] = layers[b][second_name], layers[a][first_name]
        return [*edited]

    def description(self, layers: Sequence[str]) -> str:
        """Describe the fault that the edit undoes; `layers` has the paths of the layers."""
        first, second = (f"`{layers[number]}.{name}`" for number, name in (self.first, self.second))
        return f"{first} is transposed" if first == second else f"{first} and {second} are exchanged"


def _possible_edits(layers: Sequence[LayerNorms], suspects: Sequence[int]) -> Iterator[Edit]:
    """Yield every edit of these layers that keeps all shapes."""
    for number in suspects:
        shapes = {name: item.shape for name, item in layers[number].items()}
        square = [name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == shape[1]]
        yield from (Edit((number, name), (number, name)) for name in square)
        for first, second in combinations(shapes, 2):
            if shapes[first] == shapes[second]:
                yield Edit((number, first), (number, second))
    for a, b in combinations(suspects, 2):
        yield from (Edit((a, name), (b, name)) for name in layers[a])


def _usual_strengths(layers: Sequence[LayerNorms], traces: Sequence[TrainingTrace]) -> dict[TrainingTrace, float]:
    """Return the median of each trace that is informative in these layers."""
    if len(layers) < LAYERS:
        return {}
    medians = {trace: float(trace.strengths(layers).sort().values[len(layers) // 2]) for trace in traces}
    return {trace: median for trace, median in medians.items() if median >= trace.threshold(layers[0])}


def _restoring_edits(layers: Sequence[LayerNorms], usual: Mapping[TrainingTrace, float]) -> list[Edit]:
    """Return the edits of equal layers that restore lost traces and lose none, most likely first."""

    def relative_strengths(layers: Sequence[LayerNorms]) -> Tensor:
        return torch.stack([trace.strengths(layers) / median for trace, median in usual.items()])

    before = relative_strengths(layers)
    suspects = [number for number, lost in enumerate((before < LOST).any(dim=0).tolist()) if lost]
    edits: list[tuple[float, Edit]] = []
    for edit in _possible_edits(layers, suspects):
        ends = {edit.first, edit.second}
        touched = torch.tensor(
            [[bool(ends & {(n, trace.first), (n, trace.second)}) for n in range(len(layers))] for trace in usual]
        )
        after, lost = relative_strengths(edit.of(layers)), touched & (before < LOST)
        everywhere = lost.any() and torch.equal(lost.any(dim=0), touched.any(dim=0))
        if everywhere and (after[lost] > BACK).all() and (after >= before.clamp(max=BACK))[touched].all():
            edits.append((float((after - before).sum()), edit))
    return [edit for _, edit in sorted(edits, key=lambda item: -item[0])]

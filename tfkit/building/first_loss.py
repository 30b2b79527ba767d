"""An estimate of the loss before training, from a model's shapes and initial weights, without running the model.

A model that gives every token the same probability has a loss of ln V. Large initial logits increase the loss, because
the prediction is arbitrary. Logits are large for two reasons. First, the weights of the head: logits with standard
deviation s add s^2 / 2. Second, a head that shares the table of the embedding predicts the current token again, in
proportion to the fraction of its input that is still the row of that token. The fraction follows from the sizes of
the layers' outputs, which are added to the residual stream.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from tfkit.component import Call, Head, Layer, Layers, NormConfig, Projection, Scale
from tfkit.errors import FirstLossWarning
from tfkit.graph.expand import Graph, Node
from tfkit.graph.wiring import table_owner
from tfkit.nn import Linear, StackedLinear
from tfkit.nn.spread import rows_of

DEFAULT = "fan_in"
WARNING_DIFFERENCE = 1.0
"""Difference between the first loss and ln V above which a warning is issued."""
SAMPLE = 4096
"""Number of values of a weight from which its standard deviation is estimated."""
AVERAGED = 0.3
"""Factor of the size of values when attention averages them over a dozen different tokens."""
ACTIVATED = 0.5
"""Factor of the size of a hidden layer from its activation."""


@dataclass(frozen=True)
class StreamEstimate:
    """The vectors between two nodes: their root mean square, and the fraction that is the row of the current token."""

    size: float
    token: float

    def plus(self, other: float) -> StreamEstimate:
        return StreamEstimate(math.hypot(self.size, other), self.token)

    def normed(self) -> StreamEstimate:
        return StreamEstimate(1.0, self.token / self.size if self.size else 0.0)

    def times(self, factor: float) -> StreamEstimate:
        return StreamEstimate(self.size * factor, self.token * factor)


@dataclass(frozen=True)
class FirstLoss:
    """The expected loss of a head before the first step, and the loss of a uniform distribution."""

    head: str
    loss: float
    even: float
    own_token: bool
    """True if the current token causes most of the loss."""


def warn_of_first_losses(model: nn.Module, graph: Graph) -> None:
    """Warn about heads whose first loss is far above ln V, unless published weights replace the initial weights."""
    if graph.spec.model.checkpoint is not None:
        return
    kind = graph.spec.model.init.kind_name()
    look = "`scale`" if kind == DEFAULT else f"`init: {kind}`: the default, {DEFAULT}, keeps rows and logits small"
    for first in first_losses(model, graph):
        if first.loss > first.even + WARNING_DIFFERENCE:
            why = (
                "the head shares the embedding's table, and its logits repeat the token just read"
                if first.own_token
                else "the logits of the head are large"
            )
            text = (
                f"`{first.head}` starts at a loss of about {first.loss:.0f}; even guesses have ln V, {first.even:.1f}"
            )
            warnings.warn(f"{text}: {why}; check {look}", FirstLossWarning, stacklevel=3)


def first_losses(model: nn.Module, graph: Graph) -> list[FirstLoss]:
    """Estimate the first loss of each head over a vocabulary, for weights as `tfkit.build` fills them."""
    heads = [(node, head) for node in graph.built_nodes if (head := node.config.head()) is not None]
    weighted = [(node, head, _logit_matrix(model, graph, node)) for node, head in heads]
    return [_first_loss(model, graph, node, head, weight) for node, head, weight in weighted if weight is not None]


def _first_loss(model: nn.Module, graph: Graph, node: Node, head: Head, weight: Tensor) -> FirstLoss:
    assert node.output.width is not None
    tie = node.wires.get("tie")
    owner = table_owner(graph, tie) if isinstance(tie, str) else None
    stream = _node_stream(model, graph, str(node.wires["input"]), owner)
    if not head.direct:
        stream = StreamEstimate(1.0, 0.0)  # a dense layer precedes the matrix, so its input is not a row of the table
    factor, cap = _standard_deviation(weight) * head.scale, head.softcap or math.inf
    spread = min(factor * math.sqrt(weight.size(1)) * stream.size, cap)
    repeated = min(factor * weight.size(1) * stream.token, cap)
    even = math.log(node.output.width)
    maximum = spread * math.sqrt(2 * even)  # the maximum of V numbers, beyond which the formula does not hold
    base = even + spread**2 / 2 if spread < math.sqrt(2 * even) else maximum
    loss = max(repeated, base) + math.log1p(math.exp(-abs(repeated - base)))
    return FirstLoss(node.name, loss, even, repeated > base)


def _logit_matrix(model: nn.Module, graph: Graph, node: Node) -> Tensor | None:
    """Return the matrix that computes the logits; None if it is unknown."""
    tie = node.wires.get("tie")
    if isinstance(tie, str):
        return model.get_parameter(f"{table_owner(graph, tie)}.tokens.weight")
    layers = [module for module in model.get_submodule(node.name).modules() if isinstance(module, nn.Linear)]
    matrices = [module.weight for module in layers if module.out_features == node.output.width]
    return matrices[-1] if matrices else None


def _node_stream(model: nn.Module, graph: Graph, name: str, owner: str | None) -> StreamEstimate:
    """Estimate the output of a node. For an unknown block, assume vectors of size one without the row of the token."""
    if name in graph.inputs:
        return StreamEstimate(1.0, 0.0)
    node = graph.node(graph.node(name).module)
    if node.config.table() is not None:
        return _embedding_stream(model, graph, node, owner)
    if node.stack is not None:
        return _stack_stream(model, node, node.stack, _node_stream(model, graph, str(node.wires["input"]), owner))
    return StreamEstimate(1.0, 0.0)


def _embedding_stream(model: nn.Module, graph: Graph, node: Node, owner: str | None) -> StreamEstimate:
    table = table_owner(graph, node.name)
    size = _standard_deviation(model.get_parameter(f"{table}.tokens.weight"))
    stream = StreamEstimate(size, size if table == owner else 0.0)
    for stage in node.config.after_table():
        if isinstance(stage, Scale):
            stream = stream.times(stage.number)
        elif isinstance(stage, Projection):
            stream = StreamEstimate(stream.size, 0.0)
        elif isinstance(stage, Call) and isinstance(stage.config, NormConfig):
            stream = stream.normed()
        elif isinstance(stage, Call):
            module = model.get_submodule(f"{node.name}.{stage.name}")
            tables = [module.weight for module in module.modules() if isinstance(module, nn.Embedding)]
            stream = stream.plus(_standard_deviation(tables[0]) if tables else math.sqrt(0.5))
    return stream


def _stack_stream(model: nn.Module, node: Node, stack: Layers, stream: StreamEstimate) -> StreamEstimate:
    gains: dict[str, list[float | None]] = {}
    for index in stack.runs:
        layer = stack.layers[index]
        if layer.name not in gains:
            parts = model.get_submodule(f"{node.name}.layers.{index}")
            gains[layer.name] = [_sublayer_gain(parts.get_submodule(step.name), step.role) for step in layer.steps]
        stream = _stream_after_layer(layer, gains[layer.name], stream)
    return stream.normed() if stack.final_norm is not None else stream


def _stream_after_layer(layer: Layer, gains: list[float | None], stream: StreamEstimate) -> StreamEstimate:
    """Estimate the stream after a layer, to which each sublayer adds its output."""
    first = 1.0 if layer.input_norm is not None else stream.size
    for step, gain in zip(layer.steps, gains, strict=True):
        size = 1.0 if step.norm_in is not None else first if step.reads_input else stream.size
        added = 1.0 if step.norm_out is not None or gain is None else gain * size
        base = {"previous": stream, "normed": stream.normed(), "nothing": stream.times(0)}[step.addition.onto]
        stream = base.times(step.addition.scale_onto).plus(step.addition.scale * added)
        stream = stream.normed() if step.norm_after is not None else stream
    return stream


def _sublayer_gain(module: nn.Module, role: str) -> float | None:
    """Estimate the size of a sublayer's output for inputs of size one; None if its last layer is unknown."""
    layers = list(_linear_weights(module))
    last = [(weight, residual) for weight, residual in layers if residual]
    if not last:
        return None
    first = [weight for weight, residual in layers if not residual]
    inner = _gain_of(first[-1]) if first else 1.0
    inner *= ACTIVATED if role == "ffn" else AVERAGED
    return inner * _gain_of(last[-1][0])


def _linear_weights(module: nn.Module) -> Iterator[tuple[Tensor, bool]]:
    for layer in module.modules():
        if isinstance(layer, nn.Linear | StackedLinear):
            yield layer.weight, isinstance(layer, Linear | StackedLinear) and layer.residual


def _gain_of(weight: Tensor) -> float:
    return _standard_deviation(weight) * math.sqrt(weight.size(-1))


def _standard_deviation(weight: Tensor) -> float:
    """Estimate the standard deviation of a weight from some of the values in this process."""
    weight = rows_of(weight.detach())[0]
    return float(weight.reshape(-1)[:SAMPLE].float().std(correction=0))

"""A built model without its head: new code that calls the modules of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, cast

from torch import Tensor, fx

from tfkit.building.builder import graph_of
from tfkit.building.model import unwrapped_model
from tfkit.errors import listing
from tfkit.graph.decode_split import computes_alone, predicted_input, reduce_to_output, wire_of
from tfkit.graph.expand import Graph, Node
from tfkit.nn import variable_of, written_forward

Trunk: TypeAlias = Callable[..., list[tuple[Tensor, Tensor | None, Tensor | None, dict[str, Tensor]]]]
"""(model, *inputs) -> for each head: its input, its padding mask, the tokens to predict, and the weights of other
modules that it uses."""


@dataclass(frozen=True)
class Ends:
    """The start and end of a model's path through a head."""

    node: str
    """The node that computes the logits."""
    head: str
    """The path of its module, which several nodes may call."""
    vocab_size: int
    """The number of logits."""
    mask: str | None
    """The padding mask of the head's sequence."""
    tokens: str | None
    """The input whose next tokens the logits predict; None if the model may attend to those tokens."""


AROUND = ("OptimizedModule", "DistributedDataParallel", "DataParallel", "_FabricModule", "Loss")
"""Wrappers that must not be inside a loss, because the loss would call the wrapped model directly."""


def built_model(model: object) -> fx.GraphModule:
    """Return the built model inside `model`. Raise ValueError if `model` is a wrapper that belongs around the loss."""
    name = type(model).__name__
    if name in AROUND:
        help = f"pass the model to it, and the loss to `{name}`" if name != "Loss" else "pass the model to it"
        raise ValueError(f"a loss must wrap the model that `tfkit.build` returned; got {name}: {help}")
    return unwrapped_model(model)


def find_ends(model: fx.GraphModule, outputs: Iterable[str] | None = None) -> dict[str, Ends]:
    """Return the ends of each output in a loss; raise ValueError if the loss of single rows cannot be computed."""
    graph = graph_of(model)
    if not outputs and len(graph.outputs) > 1:
        raise ValueError(
            f"`{graph.name}` returns {listing(graph.outputs)}: the loss must name its outputs, each with a weight, as "
            f"`outputs: {{{graph.outputs[0]}: 1.0}}`"
        )
    return {name: _ends_of_graph(reduce_to_output(graph, name)) for name in outputs or graph.outputs}


def _ends_of_graph(graph: Graph) -> Ends:
    """Return the ends of a graph with a single output."""
    head = graph.node(graph.outputs[0])
    if head.output.type != "logits":
        raise ValueError(f"`{graph.name}` returns {head.output.in_words()}, but a loss must be computed from logits")
    signal, vocab_size = head.signals[_head_wire(head)], head.output.width
    if vocab_size is None:
        raise ValueError(f"`{head.name}` returns one logit without an axis of classes, but this loss needs classes")
    return Ends(
        head.name, head.module, vocab_size, signal.mask if signal.type == "sequence" else None, predicted_input(graph)
    )


def _head_wire(head: Node) -> str:
    """Return the wire that feeds the head; raise ValueError unless the head computes each row independently."""
    read = [field for field in head.wires if wire_of(head, field).value == "output"]
    if len(read) != 1 or not isinstance(head.wires[read[0]], str):
        raise ValueError(f"`{head.name}` takes {listing(read)}, but a loss in chunks needs a head with one input")
    if not computes_alone(head):
        raise ValueError(
            f"`{head.name}` does not compute every position independently, so its loss cannot be computed in chunks"
        )
    return read[0]


def write_trunk(model: fx.GraphModule, all_ends: Iterable[Ends]) -> Trunk:
    """Write the forward of a model up to its heads, as a function of the model; raise ValueError if one is missing."""
    if "forward" in vars(model):
        raise ValueError("the `forward` of the model was replaced: a loss in chunks would not call it")
    graph, copies = fx.Graph(), cast(dict[fx.Node, fx.Node], {})
    output = graph.graph_copy(model.graph, copies)
    returned = [node for node in (output if isinstance(output, tuple) else [output]) if isinstance(node, fx.Node)]
    values = {variable_of(node): copy for node, copy in copies.items()}  # of a mask what is checked
    states = []
    for ends in all_ends:
        call = ("call_module", ends.head, ends.node)
        head = next((node for node in returned if (node.op, node.target, variable_of(node)) == call), None)
        if head is None:
            raise ValueError(f"the model's graph was edited: it no longer ends in `{ends.node}`")
        states.append((head.args[0], values.get(ends.mask or ""), values.get(ends.tokens or ""), dict(head.kwargs)))
    graph.output(states)
    for node in reversed(graph.nodes):  # the heads, and what only outputs outside the loss need
        if node.op == "call_module" and not node.users:
            graph.erase_node(node)
    return written_forward(graph, "trunk")[0]

"""A built model without its head: the calls are written anew, what is called is the model's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

from torch import Tensor, fx, nn

from tfkit.builder import graph_of
from tfkit.component import Pieces
from tfkit.errors import Invalid, SpecError, listing
from tfkit.graph.decode_split import split_for_decoding, wire_of
from tfkit.graph.expand import Graph, Node
from tfkit.nn import variable_of, written_forward
from tfkit.wrapped import unwrapped

Trunk: TypeAlias = Callable[..., tuple[Tensor, Tensor | None, Tensor | None, dict[str, Tensor]]]
"""(model, *inputs) -> what the head reads, its padding mask, the tokens to predict, the weights of others that the head
uses."""


@dataclass(frozen=True)
class Ends:
    """Where the path of a model through its head begins and ends."""

    head: str
    """The node that makes the logits."""
    vocab_size: int
    """How many of them."""
    mask: str | None
    """The padding mask of the sequence that it reads."""
    tokens: str | None
    """The input whose next tokens the logits predict; None where they may have been seen."""


AROUND = ("OptimizedModule", "DistributedDataParallel", "DataParallel", "_FabricModule", "Loss")
"""What a loss must not be taken of: it would call the model within, and nothing of what they are there for would be."""


def trained(model: nn.Module) -> fx.GraphModule:
    """The model that a loss is taken of; raises ValueError where the loss is what must be wrapped."""
    name = type(model).__name__
    if name in AROUND:
        help = f"hand it the model, and `{name}` the loss" if name != "Loss" else "hand it the model"
        raise ValueError(f"a loss takes what `tfkit.build` returned, and wraps it; this is {name}: {help}")
    return unwrapped(model)


def find_ends(model: fx.GraphModule) -> Ends:
    """What the graph of a model says of its head; raises ValueError where no loss of single rows can be taken."""
    graph = graph_of(model)
    if len(graph.outputs) > 1:
        raise ValueError(
            f"`{graph.name}` returns {listing(graph.outputs)}, and a loss is taken of one of them: "
            f"build it with sets=['outputs=[NODE]']"
        )
    head = graph.node(graph.outputs[0])
    if head.output.type != "logits":
        raise ValueError(f"`{graph.name}` returns {head.output.in_words()}, and a loss is taken of logits")
    signal, vocab_size = head.signals[_read(head)], head.output.width
    assert vocab_size is not None
    return Ends(head.name, vocab_size, signal.mask if signal.type == "sequence" else None, _predicted(graph))


def _read(head: Node) -> str:
    """The wire by which the head gets its rows; raises ValueError where it does not compute each of them alone."""
    read = [field for field in head.wires if wire_of(head, field).value == "output"]
    if len(read) != 1 or not isinstance(head.wires[read[0]], str):
        raise ValueError(f"`{head.name}` reads {listing(read)}, and a head in pieces has one input")
    try:
        alone = head.config.pieces(head.signals) == Pieces()
    except Invalid:
        alone = False
    if not alone:
        raise ValueError(f"`{head.name}` does not compute every position alone, so that it has no loss in pieces")
    return read[0]


def _predicted(graph: Graph) -> str | None:
    try:
        parts = split_for_decoding(graph)
    except SpecError:
        return None
    # The tokens of a prefix are read by all of it.
    prefix = any(graph.inputs[name].type == "lengths" for name in parts.given_once)
    tokens = [name for name in parts.given_again if graph.inputs[name].type == "tokens"]
    return None if prefix or len(tokens) != 1 else tokens[0]


def write_trunk(model: fx.GraphModule, ends: Ends) -> Trunk:
    """The forward of a model up to its head, as a function of the model; raises ValueError if the head is not there."""
    graph, copies = fx.Graph(), cast(dict[fx.Node, fx.Node], {})
    head = graph.graph_copy(model.graph, copies)
    if not isinstance(head, fx.Node) or (head.op, head.target) != ("call_module", ends.head):
        raise ValueError(f"the model's graph was edited: it does not end in `{ends.head}` any more")
    values = {variable_of(node): copy for node, copy in copies.items()}  # of a mask what is checked
    graph.output((head.args[0], values.get(ends.mask or ""), values.get(ends.tokens or ""), dict(head.kwargs)))
    graph.erase_node(head)
    return written_forward(graph, "trunk")[0]

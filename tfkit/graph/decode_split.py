"""A graph split for decoding: the nodes that run once for a sequence, and those that run at every step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tfkit.component import Cached, Pieces, State, WireMarker, marker
from tfkit.errors import Diagnostic, Invalid, SpecError, listing
from tfkit.graph.expand import Graph, Node, as_list
from tfkit.spec.messages import refused


@dataclass(frozen=True)
class DecodeSplit:
    """The two halves of a model that reads a sequence step by step."""

    once: tuple[Node, ...]
    """The nodes that run when a sequence begins, such as an encoder."""
    again: dict[str, tuple[Node, Pieces]]
    """The nodes that run at every step, by name, with their requirements for it."""
    given_once: tuple[str, ...]
    """Inputs of the model that are given when a sequence begins."""
    given_again: tuple[str, ...]
    """Inputs that are given step by step; the first is the one whose tokens are predicted."""
    read_once: tuple[str, ...]
    """Inputs and nodes of the first half that the second one reads."""
    always: tuple[str, ...]
    """The lengths and vectors among `read_once`: every step reads them, and the first step alone a sequence."""

    @property
    def cached(self) -> list[Cached | State]:
        """The tensors that all nodes keep of their input."""
        return [entry for _, pieces in self.again.values() for layer in pieces.caches for entry in layer]


def split_for_decoding(graph: Graph) -> DecodeSplit:
    """Split a graph for decoding; raises SpecError if the model needs its sequence as a whole."""
    nodes = {node.name: node for node in graph.nodes}
    flowing = _reached([name for name in graph.outputs if name in nodes], nodes, whole=False)
    read_once = {
        source: None
        for name in flowing
        if name in nodes
        for field, sources in nodes[name].wires.items()
        if wire_of(nodes[name], field).whole
        for source in as_list(sources)
    }
    fixed = _reached(list(read_once), nodes, whole=True)
    for name in fixed:
        if name in flowing:
            path = f"{'graph' if name in nodes else 'inputs'}.{name}"
            raise SpecError(
                Diagnostic(
                    f"`{name}` cannot be used both as a full sequence and step by step",
                    path=path,
                    notes=(_note(graph),),
                )
            )
    for name in graph.inputs:
        length = graph.inputs[name].length
        if name in flowing and length is not None:
            message = f"`{name}` always has {length} positions, and cannot be read step by step"
            raise SpecError(Diagnostic(message, path=f"inputs.{name}", notes=(_note(graph),)))
    again = {node.name: (node, _pieces(node, graph)) for node in graph.nodes if node.name in flowing}
    read = {source for node, _ in again.values() for source in as_list(node.wires.get("input", []))}
    given_again = [name for name in graph.inputs if name in flowing]
    signals = {**graph.inputs, **{node.name: node.output for node in graph.nodes}}
    return DecodeSplit(
        once=tuple(node for node in graph.nodes if node.name in fixed),
        again=again,
        given_once=tuple(name for name in graph.inputs if name in fixed),
        given_again=tuple(sorted(given_again, key=lambda name: (graph.inputs[name].optional, name not in read))),
        read_once=tuple(read_once),
        always=tuple(name for name in read_once if signals[name].type in ("lengths", "vector")),
    )


def returning(graph: Graph, output: str) -> Graph:
    """Return the graph with a single output, and the inputs that it needs; raise ValueError for an unknown output."""
    if output not in graph.outputs:
        raise ValueError(f"`{output}` is not an output of `{graph.name}`, which returns {listing(graph.outputs)}")
    needed = _reached([output], {node.name: node for node in graph.nodes}, whole=True)
    inputs = {name: signal for name, signal in graph.inputs.items() if name in needed}
    return replace(graph, inputs=inputs, outputs=(output,))


def split_if_decodable(graph: Graph) -> DecodeSplit | None:
    """Split a model into the nodes that run once and the nodes that run at every decoding step.

    Return None if the model needs full sequences.
    """
    try:
        return split_for_decoding(graph)
    except SpecError:
        return None


def read_whole(graph: Graph) -> tuple[str, ...]:
    """Return the inputs that must be complete when decoding begins: an encoder's, a memory, prefix lengths."""
    nodes = {node.name: node for node in graph.nodes}
    flowing = _reached([name for name in graph.outputs if name in nodes], nodes, whole=False)
    return tuple(name for name in graph.inputs if name not in flowing)


def wire_of(node: Node, field: str) -> WireMarker:
    """Return the marker of a wire field."""
    wire = marker(type(node.config).model_fields[field], WireMarker)
    assert wire is not None
    return wire


def computes_alone(node: Node) -> bool:
    """Return True if a node computes every position independently."""
    try:
        return node.config.pieces(node.signals) == Pieces()
    except Invalid:
        return False


def _reached(names: list[str], nodes: dict[str, Node], *, whole: bool) -> dict[str, None]:
    """Return the named nodes and inputs and their dependencies; with `whole`, also through complete wires."""
    seen: dict[str, None] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen[name] = None
        for field, sources in nodes[name].wires.items() if name in nodes else ():
            wire = wire_of(nodes[name], field)
            if wire.value == "output" and (whole or not wire.whole):
                pending += as_list(sources)
    return seen


def _pieces(node: Node, graph: Graph) -> Pieces:
    try:
        return node.config.pieces(node.signals)
    except Invalid as error:
        diagnostic = refused(error, ("graph", node.name), graph.spec.provenance)
        raise SpecError(Diagnostic(diagnostic.message, diagnostic.span, diagnostic.path, (_note(graph),))) from None


def _note(graph: Graph) -> str:
    return f"`{graph.name}` cannot be decoded token by token"

"""The split of a graph for decoding: nodes that run once per sequence, and nodes that run at every decoding step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tfkit.component import Cached, Decoding, State, WireMarker, marker
from tfkit.errors import Diagnostic, Invalid, SpecError, listing
from tfkit.graph.expand import Graph, Node, as_list
from tfkit.spec.messages import diagnostic_of


@dataclass(frozen=True)
class DecodeSplit:
    """A model in two halves, for decoding step by step."""

    initial_nodes: tuple[Node, ...]
    """Nodes that run once, before decoding begins, such as an encoder."""
    step_nodes: dict[str, tuple[Node, Decoding]]
    """Nodes that run at every step, by name, each with the arguments that it then takes."""
    initial_inputs: tuple[str, ...]
    """Inputs that are complete before decoding begins."""
    step_inputs: tuple[str, ...]
    """Inputs that grow with every step; the tokens of the first are predicted."""
    static_sources: tuple[str, ...]
    """Inputs and nodes of the first half whose values nodes of the second half take."""
    repeated_sources: tuple[str, ...]
    """The lengths and vectors among `static_sources`, which every step takes. Only the first step takes a sequence."""

    @property
    def cached(self) -> list[Cached | State]:
        """The caches and states of all nodes."""
        return [entry for _, decoding in self.step_nodes.values() for layer in decoding.caches for entry in layer]

    @property
    def block_inputs(self) -> set[str]:
        """Inputs and nodes with the block of each token. A step must have all tokens of a block."""
        return {node.stack.blocks for node, _ in self.step_nodes.values() if node.stack and node.stack.blocks}


def split_for_decoding(graph: Graph) -> DecodeSplit:
    """Split a graph for decoding; raise SpecError if the model needs full sequences."""
    nodes = {node.name: node for node in graph.nodes}
    flowing = reached_names([name for name in graph.outputs if name in nodes], nodes, static=False)
    static_sources = {
        source: None
        for name in flowing
        if name in nodes
        for field, sources in nodes[name].wires.items()
        if wire_of(nodes[name], field).static
        for source in as_list(sources)
    }
    initial = reached_names(list(static_sources), nodes, static=True)
    for name in initial:
        if name in flowing:
            path = f"{'graph' if name in nodes else 'inputs'}.{name}"
            raise SpecError(
                Diagnostic(
                    f"`{name}` cannot be used both as a full sequence and step by step",
                    path=path,
                    notes=(_decoding_note(graph),),
                )
            )
    for name in graph.inputs:
        length, type_name = graph.inputs[name].length, graph.inputs[name].type
        if name in flowing and (length is not None or type_name == "vector"):
            reason = "is a vector" if length is None else f"always has {length} positions"
            message = f"`{name}` {reason}, and cannot be read step by step"
            raise SpecError(Diagnostic(message, path=f"inputs.{name}", notes=(_decoding_note(graph),)))
    step_nodes = {node.name: (node, _decoding_arguments(node, graph)) for node in graph.nodes if node.name in flowing}
    read = {source for node, _ in step_nodes.values() for source in as_list(node.wires.get("input", []))}
    step_inputs = [name for name in graph.inputs if name in flowing]
    signals = {**graph.inputs, **{node.name: node.output for node in graph.nodes}}
    return DecodeSplit(
        initial_nodes=tuple(node for node in graph.nodes if node.name in initial),
        step_nodes=step_nodes,
        initial_inputs=tuple(name for name in graph.inputs if name in initial),
        step_inputs=tuple(sorted(step_inputs, key=lambda name: (graph.inputs[name].optional, name not in read))),
        static_sources=tuple(static_sources),
        repeated_sources=tuple(name for name in static_sources if signals[name].type in ("lengths", "vector")),
    )


def reduce_to_output(graph: Graph, output: str) -> Graph:
    """Reduce a graph to one output and the inputs on which it depends; raise ValueError for an unknown output."""
    if output not in graph.outputs:
        raise ValueError(f"`{output}` is not an output of `{graph.name}`, which returns {listing(graph.outputs)}")
    needed = reached_names([output], {node.name: node for node in graph.nodes}, static=True)
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


def predicted_input(graph: Graph) -> str | None:
    """Return the input whose next tokens the logits of a graph predict; None if the model may attend to those tokens.

    The graph must have a single output.
    """
    try:
        parts = split_for_decoding(graph)
    except SpecError:
        return None
    # All positions of a prefix or of a block attend to each other.
    prefix = parts.block_inputs or any(graph.inputs[name].type == "lengths" for name in parts.initial_inputs)
    tokens = [name for name in parts.step_inputs if graph.inputs[name].type == "tokens"]
    return None if prefix or len(tokens) != 1 else tokens[0]


def static_inputs(graph: Graph) -> tuple[str, ...]:
    """Return the inputs that must be complete before decoding begins: an encoder's, a memory, prefix lengths."""
    nodes = {node.name: node for node in graph.nodes}
    flowing = reached_names([name for name in graph.outputs if name in nodes], nodes, static=False)
    return tuple(name for name in graph.inputs if name not in flowing)


def wire_of(node: Node, field: str) -> WireMarker:
    """Return the marker of a wire field."""
    wire = marker(type(node.config).model_fields[field], WireMarker)
    assert wire is not None
    return wire


def memory_field(node: Node) -> str:
    """Return the name of the field that is a node's `MemoryWire`; empty if the node has no memory."""
    wires = {field: wire_of(node, field) for field in node.wires}
    return next((field for field, wire in wires.items() if wire.mask and wire.static), "")


def computes_alone(node: Node) -> bool:
    """Return True if a node computes every position independently."""
    try:
        return node.config.decoding(node.signals) == Decoding()
    except Invalid:
        return False


def reached_names(names: list[str], nodes: dict[str, Node], *, static: bool) -> dict[str, None]:
    """Return nodes and inputs with their dependencies; with `static`, also those through wires to static values."""
    seen: dict[str, None] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen[name] = None
        for field, sources in nodes[name].wires.items() if name in nodes else ():
            wire = wire_of(nodes[name], field)
            if wire.value == "output" and (static or not wire.static):
                pending += as_list(sources)
    return seen


def _decoding_arguments(node: Node, graph: Graph) -> Decoding:
    try:
        return node.config.decoding(node.signals)
    except Invalid as error:
        diagnostic = diagnostic_of(error, ("graph", node.name), graph.spec.provenance)
        raise SpecError(
            Diagnostic(diagnostic.message, diagnostic.span, diagnostic.path, (_decoding_note(graph),))
        ) from None


def _decoding_note(graph: Graph) -> str:
    return f"`{graph.name}` cannot be decoded token by token"

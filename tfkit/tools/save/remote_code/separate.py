"""A language model in the two parts that transformers requires: a body, which returns vectors, and a head for logits.

The body takes the vectors of the tokens, which users of transformers may compute; a `Past`, which counts the tokens
before them; and the tensors that its layers cache. Without a `Past` and a cache it takes entire sequences. It has the
module of each node of the graph, and the head has the modules of the last node, with the output matrix as `lm_head`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx, nn

from tfkit.building.builder import call
from tfkit.checkpoint.remote_code import BODY, LM_HEAD, MATRIX, name_in_folder
from tfkit.component import Cached, State
from tfkit.errors import Diagnostic, SpecError, listing
from tfkit.graph.decode_split import split_for_decoding
from tfkit.graph.expand import Graph, Node
from tfkit.graph.wiring import masks_in_use
from tfkit.nn import Linear, Past, Program, Value
from tfkit.nn.program import Written, written_class


@dataclass(frozen=True)
class Parts:
    """The nodes of a model, by what they are for transformers."""

    graph: Graph
    embedding: Node
    body: tuple[Node, ...]
    """All nodes but the head, in order."""
    stack: Node
    """The node with the layers."""
    head: Node
    decodes: bool
    """True for a decoder, which is read token by token; False for an encoder, which predicts masked tokens."""
    types: str | None
    """The input with the types of tokens, if the model has one."""

    @property
    def head_class(self) -> str:
        """The end of the name of the class with the head, which is also the end of transformers' AutoModel for it."""
        return "ForCausalLM" if self.decodes else "ForMaskedLM"

    @property
    def cached(self) -> tuple[tuple[Cached | State, ...], ...]:
        """The tensors that each layer keeps."""
        return self.stack.config.pieces(self.stack.signals).caches if self.decodes else ()

    @property
    def is_tied(self) -> bool:
        """True if the head has the table of the embedding as its matrix."""
        return "tie" in self.head.wires

    def name_in_folder(self, name: str) -> str:
        """Return the name of a tensor, or of a module, of the built model as the folder has it."""
        return name_in_folder(name, self.head.name)


def parts_of(graph: Graph) -> Parts:
    """Return the parts of a decoder, or of an encoder that predicts masked tokens.

    Raise SpecError for any other model.
    """
    decodes = _decodes(graph)
    *body, head = graph.nodes
    if graph.outputs != (head.name,):
        raise cannot(graph, f"it returns {listing(graph.outputs)}, and a language model returns only its last node")
    if head.output.type != "logits" or head.config.head() is None or head.signals["input"].type != "sequence":
        raise cannot(graph, f"`{head.name}` is not the head of a language model")
    if not body or str(head.wires["input"]) != body[-1].name:
        raise cannot(graph, f"`{head.name}` does not read the last node before it")
    tokens, *more = graph.inputs
    readers = [node for node in body if tokens in node.wires.values()]
    if len(readers) != 1 or readers[0].config.table() is None or "tie" in readers[0].wires:
        raise cannot(graph, "its tokens must be read by one embedding with a table, and by no other node")
    are_types = len(more) == 1 and graph.inputs[more[0]].optional and readers[0].wires.get("tables") == more
    if more and (decodes or not are_types):
        raise cannot(graph, f"it takes {listing(graph.inputs)}, and a folder has one input of tokens")
    stacks = [node for node in body if node.stack is not None]
    if len(stacks) != 1:
        names = listing(node.name for node in stacks) or "none"
        raise cannot(graph, f"exactly one of its nodes must have layers; got {names}")
    return Parts(graph, readers[0], tuple(body), stacks[0], head, decodes, more[0] if more else None)


def _decodes(graph: Graph) -> bool:
    """Return False for an encoder. Raise SpecError for a decoder that cannot be read token by token."""
    layers = [layer for node in graph.nodes if node.stack is not None for layer in node.stack.layers]
    if any(step.mask is not None and not step.mask.causal for layer in layers for step in layer.steps):
        return False
    if once := split_for_decoding(graph).once:
        raise cannot(graph, f"{listing(node.name for node in once)} must be complete before a token is read")
    return True


def cannot(graph: Graph, why: str) -> SpecError:
    """Return the error for a model that transformers has no class for."""
    message = f"`{graph.name}` cannot be written for transformers: {why}"
    return SpecError(Diagnostic(message, help="write it with --layout tfkit"))


def separated(model: fx.GraphModule, parts: Parts, name: str) -> fx.GraphModule:
    """Return the head of a built model, with the body as its child `BODY`.

    Args:
        model: the model. Both parts have its modules.
        parts: its nodes.
        name: the beginning of the names of both classes.
    """
    head = _head(model, parts, f"{name}{parts.head_class}")
    head.add_module(BODY, _body(model, parts, f"{name}Model"))
    return head


def _body(model: fx.GraphModule, parts: Parts, class_name: str) -> fx.GraphModule:
    """Build the body: vectors of tokens, and optionally a padding mask, types, a `Past` and caches -> vectors."""
    program, graph = Program(), parts.graph
    tokens = next(iter(graph.inputs))
    values: dict[str, Value] = {tokens: program.input("x")}
    mask = graph.inputs[tokens].mask
    values |= {mask: program.input("mask", optional=True)} if mask in masks_in_use(parts.body) and mask else {}
    values |= {parts.types: program.input("types", optional=True)} if parts.types else {}
    memory: dict[str, Value] = {}
    if parts.decodes:
        memory = {"past": program.input("past", Past, optional=True)}
        memory["caches"] = program.input("caches", list[list[Tensor]], optional=True)
    for node in parts.body:
        module = model.get_submodule(node.name)
        module = _of_vectors(_written(graph, node, module, "tokens")) if node is parts.embedding else module
        further: dict[str, Value] = {}
        if parts.decodes:
            pieces = node.config.pieces(node.signals)
            further = {name: value for name, value in memory.items() if getattr(pieces, name)}
        values |= call(program, graph, node, module, values, **further)
    return program.build_graph_module(values[parts.body[-1].name], class_name)


def _step(module: Written, child: str) -> Value:
    """Return the step of a module that calls one of its children."""
    return next(value for value, step in module.steps.items() if step.op == "call_module" and step.target == child)


def _of_vectors(embedding: Written) -> nn.Module:
    """Return an embedding that takes the vectors of tokens. It keeps the table, in which callers look them up."""
    steps = dict(embedding.steps)
    lookup = _step(embedding, "tokens")
    ids = next(value for value, step in steps.items() if step.op == "placeholder")
    used = {argument for value, step in steps.items() if value != lookup for argument in step.args}
    unused = [value for value in steps if value in steps[lookup].args and value not in used and value != ids]
    steps[ids] = steps[ids]._replace(name="x", target="x")
    del steps[lookup]
    for value in unused:  # the check of the length
        del steps[value]
    renamed = {lookup: ids}
    steps = {
        value: step._replace(args=tuple(renamed.get(argument, argument) for argument in step.args))
        for value, step in steps.items()
    }
    module = written_class(steps, type(embedding).__name__)()
    for name, child in embedding.named_children():
        module.add_module(name, child)
    return module


def _head(model: fx.GraphModule, parts: Parts, class_name: str) -> fx.GraphModule:
    """Build the head: vectors -> logits. Its matrix is a linear layer also where the model uses the embedding's."""
    program, node = Program(), parts.head
    module = _written(parts.graph, node, model.get_submodule(node.name), MATRIX)
    values: dict[object, Value] = {}
    output: Value | None = None
    for value, step in module.steps.items():
        args = [values.get(argument, argument) for argument in step.args]
        if step.op == "placeholder":
            if step.name != "tie":
                values[value] = program.input("x")
        elif step.op == "call_module" and step.target == MATRIX:
            matrix = module.get_submodule(MATRIX)
            if parts.is_tied:
                matrix = _matrix(node, bias=matrix.bias is not None)
            values[value] = program.call(LM_HEAD, matrix, args[0])
        elif step.op == "call_module":
            values[value] = program.call(step.target, module.get_submodule(step.target), *args)
        elif step.op == "call_function":
            values[value] = program.apply(step.name, step.target, *args, **step.kwargs)
        elif step.op == "output":
            output = values[step.args[0]]
    return program.build_graph_module(output, class_name)


def _written(graph: Graph, node: Node, module: nn.Module, child: str) -> Written:
    """Return the module of a node. Raise SpecError unless its steps are known, and call this child."""
    if isinstance(module, Written) and any(step.target == child for step in module.steps.values()):
        return module
    raise cannot(graph, f"the module of `{node.name}` has no `{child}`, to which transformers gives new rows")


def _matrix(head: Node, *, bias: bool) -> Linear:
    """Build the matrix of a head that has the table of an embedding."""
    table, logits = head.signals["tie"], head.config.output(head.signals)
    assert not isinstance(table, list)
    assert table.width is not None
    assert logits.width is not None
    return Linear(table.width, logits.width, bias=bias)

"""The nodes of a model by their role in transformers: bodies, which return vectors, and a head for logits.

An encoder-decoder has two bodies: an encoder, and a decoder that runs token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from tfkit.checkpoint.llama_names import LlamaNames
from tfkit.checkpoint.remote_code import BODY, DECODER, ENCODER, MATRIX, folder_names, head_of, matrix_name
from tfkit.component import Decoding
from tfkit.errors import Diagnostic, SpecError, listing
from tfkit.graph.decode_split import DecodeSplit, split_for_decoding, split_if_decodable
from tfkit.graph.expand import Graph, Node
from tfkit.graph.wiring import masks_in_use, table_owner


class Task(NamedTuple):
    """The purpose of a model, and the class of transformers that opens it.

    Attributes:
        auto: the suffix in the name of this class, `AutoModel...`.
        tag: the task's name on the Hub.
        output: the class of the results in transformers.
        returns: a description of the results.
    """

    auto: str
    tag: str
    output: str
    returns: str

    @property
    def class_name(self) -> str:
        """The suffix of the name of the written class; empty for a body without a head."""
        generates = self.auto in ("ForSeq2SeqLM", "ForSpeechSeq2Seq")
        return "ForConditionalGeneration" if generates else self.auto


CAUSAL = Task("ForCausalLM", "text-generation", "CausalLMOutputWithPast", "the logits of the next token")
MASKED_LM = Task("ForMaskedLM", "fill-mask", "MaskedLMOutput", "the logits of masked tokens")
VECTORS = Task("", "feature-extraction", "", "vectors")
GENERATORS = {
    "tokens": Task("ForSeq2SeqLM", "text2text-generation", "Seq2SeqLMOutput", "the logits of the next token"),
    "sequence": Task(
        "ForSpeechSeq2Seq", "automatic-speech-recognition", "Seq2SeqLMOutput", "the logits of the next token"
    ),
}
"""The tasks of encoder-decoders, by the type of the encoder's input."""
CLASSIFIERS = {
    ("tokens", "vector"): Task(
        "ForSequenceClassification", "text-classification", "SequenceClassifierOutput", "the logits of classes"
    ),
    ("tokens", "sequence"): Task(
        "ForTokenClassification", "token-classification", "TokenClassifierOutput", "the logits of each token's classes"
    ),
    ("image", "vector"): Task(
        "ForImageClassification", "image-classification", "ImageClassifierOutput", "the logits of classes"
    ),
    ("sequence", "vector"): Task(
        "ForAudioClassification", "audio-classification", "SequenceClassifierOutput", "the logits of classes"
    ),
}
"""The tasks of classifiers, by the types of the model's and of the classifier's input."""
ARGUMENTS = {"tokens": "input_ids", "image": "pixel_values", "sequence": "input_features"}
"""Names of inputs in transformers, by type."""


@dataclass(frozen=True, eq=False)
class Body:
    """Nodes that run together: all nodes before the head; or the encoder, or the decoder with its memory."""

    graph: Graph
    name: str
    """The name of its module in the body; empty if it is the entire body."""
    input: str
    nodes: tuple[Node, ...]
    stack: Node
    """The node with the layers."""
    decodes: bool
    """True if the body is decoded token by token."""
    embedding: Node | None = None
    """The node that looks up tokens; None if the input is an image or features."""
    types: str | None = None
    """The input with the types of tokens, if there is one."""
    memory: str | None = None
    """The node of the encoder whose output a decoder attends to."""

    @property
    def class_end(self) -> str:
        """The suffix of the name of its class."""
        return self.name.title() or "Model"

    @property
    def argument(self) -> str:
        """The name of its input in transformers."""
        return ARGUMENTS[self.graph.inputs[self.input].type]

    @property
    def is_masked(self) -> bool:
        """True if it takes a padding mask."""
        return self.mask_name is not None or self.embedding is not None

    @property
    def mask_name(self) -> str | None:
        """The name of the padding mask in the graph; None if no node uses it."""
        mask = self.graph.inputs[self.input].mask
        return mask if mask in masks_in_use(self.nodes) else None

    @property
    def depth(self) -> int | None:
        """The number of its layers."""
        return None if self.stack.stack is None else self.stack.stack.depth

    @property
    def decoding(self) -> Decoding:
        """The arguments of its stack for decoding."""
        return self.stack.config.decoding(self.stack.signals) if self.decodes else Decoding()


class ParallelPlan(NamedTuple):
    """The plans with which transformers divides a model's body among processes.

    Attributes:
        tensor: names of modules and weights, with `*` for the number of a layer, and their styles.
        pipeline: whether the layers can run in several processes, one after the other.
        experts: names of modules and weights, as in `tensor`, if each process has some of the experts.
    """

    tensor: tuple[tuple[str, str], ...]
    pipeline: bool
    experts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Parts:
    """The nodes of a model by their role in transformers."""

    graph: Graph
    bodies: tuple[Body, ...]
    """The body; or the encoder and the decoder."""
    head: tuple[Node, ...]
    """The nodes that compute logits; empty for a model that returns vectors."""
    vector: Node | None
    """The node with a vector for each sequence, if a model without a head returns one."""
    task: Task
    names: LlamaNames | None = None
    """The names of the modules of the body in the folder; None for the names of the model."""
    plan: ParallelPlan | None = None
    """The plans with which transformers divides the model among processes."""

    @property
    def last(self) -> Body:
        """The body whose vectors the head takes."""
        return self.bodies[-1]

    @property
    def decodes(self) -> bool:
        """True if the model generates text."""
        return self.last.decodes

    def path_of(self, body: Body) -> str:
        """Return the name of the module of a body in the class of the model."""
        return ".".join([*[BODY] * bool(self.head), *[body.name] * bool(body.name)])

    @property
    def tied_matrix(self) -> str | None:
        """The name of the head's output matrix if it is tied to a table."""
        return matrix_name(self.head[-1]) if self.head and "tie" in self.head[-1].wires else None

    @property
    def ties(self) -> dict[str, str]:
        """Names of tied tables and matrices, each with the name of its original."""
        names, tied = folder_names(self.graph, self.names), {}
        embeddings = [body.embedding for body in self.bodies if body.embedding is not None]
        for node in [*embeddings, *self.head[-1:]]:
            if isinstance(tie := node.wires.get("tie"), str):
                child = "tokens" if node in embeddings else MATRIX
                owner = table_owner(self.graph, tie)
                tied[names(f"{node.name}.{child}.weight")] = names(f"{owner}.tokens.weight")
        return tied

    @property
    def arguments(self) -> dict[str, str]:
        """Names of the inputs in transformers."""
        names = {body.input: f"{'decoder_' if body.memory else ''}{body.argument}" for body in self.bodies}
        return names | {body.types: "token_type_ids" for body in self.bodies if body.types}

    def name_in_class(self, path: str) -> str:
        """Return the name of a module in the class that contains it, a body or the head."""
        if any(path.split(".")[0] == node.name for node in self.head):
            return folder_names(self.graph)(path)
        return path if self.names is None else self.names(path)


def parts_of(graph: Graph) -> Parts:
    """Return the parts of a model. Raise SpecError for a model for which transformers has no class."""
    if shared := next((node for node in graph.nodes if node.module != node.name), None):
        raise unsupported_error(graph, f"`{shared.name}` uses the weights of `{shared.module}`")
    head = head_of(graph)
    nodes = graph.nodes[: len(graph.nodes) - len(head)]
    split = _decoding_split(graph, head)
    if split is None or not split.initial_nodes:
        source, *further = graph.inputs
        bodies: tuple[Body, ...] = (_body_of(graph, "", source, nodes, further, decodes=split is not None),)
    else:
        bodies = _encoder_decoder(graph, split, nodes)
    last = bodies[-1].nodes[-1]
    vector = None
    if head:
        _check_head(graph, head, bodies[-1])
    else:
        vector = last if last.output.type == "vector" else None
        names = {node.name: None for node in (last_sequence(bodies[-1]), last)}
        if not (set(graph.outputs) <= {*names} and graph.outputs[-1] == last.name):
            raise unsupported_error(graph, f"it must return logits or vectors; it returns {listing(graph.outputs)}")
    return Parts(graph, bodies, head, vector, _task_of(graph, bodies, head))


def _decoding_split(graph: Graph, head: tuple[Node, ...]) -> DecodeSplit | None:
    """Split a model that generates text for decoding; return None for any other model.

    Raise SpecError for a decoder that cannot be decoded token by token.
    """
    if not head or head[-1].config.head() is None:
        return None
    if (split := split_if_decodable(graph)) is not None:
        return split
    layers = [layer for node in graph.nodes if node.stack is not None for layer in node.stack.layers]
    if all(step.mask is None or step.mask.causal for layer in layers for step in layer.steps):
        split_for_decoding(graph)  # raises
    return None


def _encoder_decoder(graph: Graph, split: DecodeSplit, nodes: tuple[Node, ...]) -> tuple[Body, Body]:
    if len(graph.inputs) != 2 or len(split.initial_inputs) != 1:
        raise unsupported_error(
            graph, f"an encoder-decoder must take a source and a target; it takes {listing(graph.inputs)}"
        )
    (source,), (target,) = split.initial_inputs, split.step_inputs
    once = {node.name for node in split.initial_nodes}
    encoder = tuple(node for node in nodes if node.name in once)
    rest = tuple(node for node in nodes if node.name not in once)
    if split.static_sources != (encoder[-1].name,):
        message = f"its decoder must take only the output of the encoder; it takes {listing(split.static_sources)}"
        raise unsupported_error(graph, message)
    return (
        _body_of(graph, ENCODER, source, encoder, [], decodes=False),
        replace(_body_of(graph, DECODER, target, rest, [], decodes=True), memory=encoder[-1].name),
    )


def _body_of(
    graph: Graph, name: str, source: str, nodes: tuple[Node, ...], further: list[str], *, decodes: bool
) -> Body:
    """Return a body. Raise SpecError unless it has one input, not counting token types, and one stack of layers."""
    if graph.inputs[source].type not in ARGUMENTS:
        raise unsupported_error(graph, f"its input `{source}` is {graph.inputs[source].in_words()}")
    readers = [node for node in nodes if source in node.wires.values()]
    embedding = None
    if graph.inputs[source].type == "tokens":
        if len(readers) != 1 or readers[0].config.table() is None:
            raise unsupported_error(graph, f"only one node, an embedding with a table, may take `{source}`")
        embedding = readers[0]
    has_types = len(further) == 1 and graph.inputs[further[0]].optional
    if further and (decodes or embedding is None or not has_types or embedding.wires.get("tables") != further):
        raise unsupported_error(graph, f"it must take a single input of tokens; it takes {listing(graph.inputs)}")
    stacks = [node for node in nodes if node.stack is not None]
    if len(stacks) != 1:
        names = listing(node.name for node in stacks) or "none"
        raise unsupported_error(graph, f"exactly one of its nodes must have layers; got {names}")
    return Body(graph, name, source, nodes, stacks[0], decodes, embedding, further[0] if further else None)


def last_sequence(body: Body) -> Node:
    return [node for node in body.nodes if node.output.type == "sequence"][-1]


def _check_head(graph: Graph, head: tuple[Node, ...], body: Body) -> None:
    """Raise SpecError unless the nodes of a head take only each other's outputs, and the last vectors of the body."""
    sources = {body.nodes[-1].name, *(node.name for node in head)}
    for node in head:
        wires = [source for field, source in node.wires.items() if field != "tie"]
        if not all(isinstance(source, str) and source in sources for source in wires):
            raise unsupported_error(graph, f"`{node.name}` must take the output of the last node before it")
    if masks_in_use(head) - {None, graph.inputs[body.input].mask}:
        raise unsupported_error(graph, f"`{head[0].name}` must use the padding mask of an input, not of a node")


def _task_of(graph: Graph, bodies: tuple[Body, ...], head: tuple[Node, ...]) -> Task:
    source = graph.inputs[bodies[0].input].type
    if not head:
        return VECTORS
    *_, last = head
    over = last.signals["input"].type
    if last.config.head() is not None and over == "sequence":
        task = (CAUSAL if bodies[0].decodes else MASKED_LM) if source == "tokens" else None
        task = GENERATORS.get(source) if len(bodies) == 2 else task
    else:
        task = CLASSIFIERS.get((source, over)) if last.config.head() is None else None
    if task is None or last.output.width is None:
        raise unsupported_error(graph, f"`{last.name}` must be a head that transformers supports")
    return task


def unsupported_error(graph: Graph, why: str) -> SpecError:
    """Return the error for a model for which transformers has no class."""
    message = f"`{graph.name}` cannot be written for transformers: {why}"
    return SpecError(Diagnostic(message, help="write it with --layout tfkit"))

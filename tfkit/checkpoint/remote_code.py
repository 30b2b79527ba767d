"""The names of a model's tensors in a folder that `tfkit save` wrote with code for transformers.

The nodes are in a body, `model`, or in its halves `model.encoder` and `model.decoder`. The last nodes are the head,
whose output matrix is `lm_head` or `classifier`. A model without a head has only the body.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from tfkit.checkpoint.llama_names import LlamaNames
from tfkit.checkpoint.weight_map import Link, WeightMap, tensor_locations_of
from tfkit.graph.decode_split import split_if_decodable
from tfkit.graph.expand import Graph, Node

BODY = "model"
ENCODER, DECODER = "encoder", "decoder"
LM_HEAD, CLASSIFIER = "lm_head", "classifier"
MATRIX = "output"
"""The name of the output matrix in the module of a head."""


def head_of(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes that compute logits from the last sequence of vectors; empty if the model returns vectors."""
    *_, last = graph.nodes
    if graph.outputs != (last.name,) or last.output.type != "logits":
        return ()
    sequences = [index for index, node in enumerate(graph.nodes) if node.output.type == "sequence"]
    return graph.nodes[sequences[-1] + 1 :] if sequences else ()


def matrix_name(head: Node) -> str:
    """Return the name of the output matrix of a model's last node."""
    return CLASSIFIER if head.config.head() is None else LM_HEAD


def folder_names(graph: Graph, llama: LlamaNames | None = None) -> Callable[[str], str]:
    """Return the function that maps the name of a model's tensor or module to its name in the folder.

    With `llama`, it also maps the names of the parts of fused projections.
    """
    head, split = head_of(graph), split_if_decodable(graph)
    encoder = {node.name for node in split.initial_nodes} if split else set()

    def name_in_folder(name: str) -> str:
        node, _, rest = name.partition(".")
        if not head:
            return name
        if node == head[-1].name:
            return f"{matrix_name(head[-1])}{rest.removeprefix(MATRIX)}" if rest.split(".")[0] == MATRIX else rest
        if any(node == part.name for part in head):
            return name
        part = "" if not encoder else f"{ENCODER}." if node in encoder else f"{DECODER}."
        return f"{BODY}.{part}{name if llama is None else llama(name)}"

    return name_in_folder


def transformers_map(model: nn.Module, graph: Graph, llama: LlamaNames | None = None) -> WeightMap:
    """Return the map of a folder that was written for transformers, by default with the names of the model."""
    weights, name_in_folder = WeightMap.of_model(model), folder_names(graph, llama)
    names = [name for link in weights.links for name in link.file]
    if llama is not None:
        weights = replace(weights, locations={**weights.locations, **tensor_locations_of(model)})
        names = [part for name in names for part in _divided(name, model, llama)]
    return replace(weights, links=tuple(Link((name,), (name_in_folder(name),)) for name in names))


def _divided(tensor: str, model: nn.Module, llama: LlamaNames) -> list[str]:
    """Return the names of the parts of a fused projection's tensor that have names; else the name of the tensor."""
    path, _, leaf = tensor.rpartition(".")
    return [f"{part}.{leaf}" for part in llama.parts_of(path, model.get_submodule(path))] or [tensor]

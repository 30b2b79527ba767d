"""The layout `sentence_transformers`: the encoder of a model of texts as code for transformers, with its pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import fx

import tfkit
from tfkit.building.builder import build, graph_of
from tfkit.checkpoint.folder_format import spec_text
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph, Node, wire_sources
from tfkit.plugin.manager import Plugins
from tfkit.spec.render import spec_data
from tfkit.tools.eject.remote_code.folder import TransformersLayout, write_folder, write_json
from tfkit.tools.eject.remote_code.parts import parts_of, unsupported_error
from tfkit.tools.eject.remote_code.proof import Folders, check_transformers
from tfkit.tools.eject.remote_code.tokenizer import FILE, SETTINGS
from tfkit.tools.save.layouts import Layout, ModelOrigin

MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
"""The class of each module of sentence-transformers, by its folder."""
POOLING = {"first": "cls_token", "last": "lasttoken", "mean": "mean_tokens"}
"""The pooling mode of sentence-transformers for each `select` of a pooler."""


class SentenceTransformersLayout(Layout):
    """The encoder of queries and its pooler, which `SentenceTransformer` opens; embeddings are normalized."""

    name = "sentence_transformers"
    description = "the encoder of a model of texts, for SentenceTransformer with trust_remote_code=True"
    files = (
        *TransformersLayout.files,
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        *list(MODULES)[1:],
    )

    def write(self, model: fx.GraphModule, folder: Path, origin: ModelOrigin) -> None:
        check_transformers()
        graph = graph_of(model)
        pooler = _pooler_of(graph)
        if not origin.companions.tokenizer_names:
            message = f"`{graph.name}` cannot be written for sentence-transformers without a tokenizer"
            raise SpecError(
                Diagnostic(
                    message,
                    help="put a tokenizer next to its weights, or name its folder in Python: `files_from=FOLDER`",
                )
            )
        encoder = _encoder_of(model, pooler, origin.plugins)
        parts_of(graph_of(encoder))  # raises an error before the process starts
        with Folders() as process:
            text = spec_text(graph_of(encoder).spec)
            write_folder(encoder, folder, text, process, companions=origin.companions, weights_from=origin.weights)
        settings = _padded_settings(folder, graph)
        write_json(folder / SETTINGS, settings)
        modes = {f"pooling_mode_{mode}": select == dict(pooler.config)["select"] for select, mode in POOLING.items()}
        modules = [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
            for index, (path, name) in enumerate(MODULES.items())
        ]
        contents: dict[str, Any] = {
            "modules.json": modules,
            "sentence_bert_config.json": {"max_seq_length": settings.get("model_max_length"), "do_lower_case": False},
            "config_sentence_transformers.json": {"similarity_fn_name": "cosine"},
            "1_Pooling/config.json": {"word_embedding_dimension": pooler.output.width, **modes},
            "2_Normalize/config.json": {},
        }
        for name, content in contents.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_json(folder / name, content)


def _pooler_of(graph: Graph) -> Node:
    """Return the pooler of queries. Raise SpecError unless all outputs are vectors of one pooler of one encoder."""
    pooler = graph.node(graph.outputs[0])
    separate = [name for name in graph.outputs if graph.node(name).module != pooler.name]
    if separate or pooler.config.kind_name() != "pooler" or dict(pooler.config)["activation"] is not None:
        message = f"`{graph.name}` cannot be written for sentence-transformers: its outputs must be vectors of a"
        message = f"{message} `pooler` without activation, which all of them share; got {', '.join(graph.outputs)}"
        raise SpecError(Diagnostic(message, help="write it with --layout tfkit"))
    return pooler


def _encoder_of(model: fx.GraphModule, pooler: Node, plugins: Plugins) -> fx.GraphModule:
    """Build the part of a model that computes the input of a pooler, with the weights of the model."""
    graph, last = graph_of(model), pooler.wires["input"]
    sources, names = {str(last)}, list[str]()
    for node in reversed(graph.nodes):
        if node.name in sources:
            sources.update(wire_sources(node.wires))
            names.insert(0, node.name)
    if shared := next((name for name in names if graph.node(name).module != name), None):
        raise unsupported_error(graph, f"`{shared}` uses the weights of `{graph.node(shared).module}`")
    data: dict[str, Any] = spec_data(graph.spec.model)
    nodes = data["graph"]
    data["graph"] = {  # a node without `input` would take the output of the node above it
        name: {**graph.node(name).wires, **({"block": nodes[name]} if isinstance(nodes[name], str) else nodes[name])}
        for name in names
    }
    data |= {"inputs": [name for name in graph.inputs if name in sources], "outputs": [last]}
    data.pop("parameters", None)
    encoder = build(tfkit.load(data, plugins=plugins))
    state = model.state_dict()
    encoder.load_state_dict({name: state[name] for name in encoder.state_dict()})
    weight = next(model.parameters())
    return encoder.to(weight.device, weight.dtype)


def _padded_settings(folder: Path, graph: Graph) -> dict[str, Any]:
    """Return the settings of the tokenizer with a token for padding. Raise SpecError if there is no suitable token."""
    settings: dict[str, Any] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    if settings.get("pad_token") is None:  # padding is masked, so its token has no effect
        tokenizer = json.loads((folder / FILE).read_text(encoding="utf-8"))
        specials = [token["content"] for token in tokenizer.get("added_tokens", ()) if token["special"]]
        # A character is never merged with others, so a text with the character has the same tokens as before.
        characters = tokenizer["model"]["vocab"] if tokenizer["model"]["type"] == "WordLevel" else ()
        settings["pad_token"] = settings.get("eos_token") or next(iter([*specials, *characters]), None)
        if settings["pad_token"] is None:
            message = f"`{graph.name}` cannot be written for sentence-transformers: its tokenizer has no special token"
            raise SpecError(Diagnostic(message, help="add a `pad_token` to its tokenizer_config.json"))
    return settings

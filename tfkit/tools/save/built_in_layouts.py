"""The layouts `tfkit` and `huggingface`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from torch import fx

from tfkit.arguments import name_of
from tfkit.building.builder import graph_of
from tfkit.checkpoint.config_json import with_further_fields
from tfkit.checkpoint.fitting import safetensors_metadata
from tfkit.checkpoint.folder_format import write_model
from tfkit.checkpoint.links import published_map
from tfkit.checkpoint.weight_map import write_shards
from tfkit.spec.folder import CONFIG
from tfkit.tools.import_.importing import export_config
from tfkit.tools.save.layouts import Layout, ModelOrigin


class TfkitLayout(Layout):
    """The resolved spec, and the weights under the names of the model."""

    name = "tfkit"
    description = "the weights by the model's own names"

    def write(self, model: fx.GraphModule, folder: Path, origin: ModelOrigin) -> None:
        origin.companions.write(folder)
        write_model(model, graph_of(model), folder)


class HuggingfaceLayout(Layout):
    """The resolved spec, a config.json, and the weights under the names in the spec's `checkpoint`."""

    name = "huggingface"
    description = "a config.json and the tensors of the spec's family, for from_pretrained"
    drops = True

    def write(self, model: fx.GraphModule, folder: Path, origin: ModelOrigin) -> None:
        graph, state = graph_of(model), model.state_dict()
        assert graph.spec.family is not None
        if any("memory" in node.wires for node in graph.nodes):
            origin = replace(origin, companions=origin.companions.with_start(graph.spec.family))
        fields = with_further_fields(export_config(graph, origin.plugins), origin.companions.fields)
        weights = published_map(model, graph.spec.family)
        types = {name_of(tensor.dtype) for tensor in state.values()}
        origin.write(folder)
        text = json.dumps({**fields, "dtype": types.pop() if len(types) == 1 else "float32"}, indent=2)
        (folder / CONFIG).write_text(f"{text}\n", encoding="utf-8")
        for file in write_shards(weights, state, folder, metadata=safetensors_metadata(graph)):
            shutil.copymode(folder / CONFIG, file)

"""The files of a folder that transformers opens: code, config, weights, generation config, tokenizer and model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx

from tfkit.arguments import name_of
from tfkit.building.builder import graph_of
from tfkit.checkpoint.fitting import safetensors_metadata
from tfkit.checkpoint.remote_code import transformers_map
from tfkit.checkpoint.weight_map import write_shards
from tfkit.graph.expand import Node
from tfkit.graph.input_shapes import max_len
from tfkit.spec.folder import CONFIG, MAX_CONFIG, SPEC, SPEC_KEY
from tfkit.spec.header import read_object
from tfkit.tools.save.remote_code.card import CARD, PICTURE, model_card, picture_of
from tfkit.tools.save.remote_code.modeling import WrittenCode, code_of, model_type
from tfkit.tools.save.remote_code.parts import Parts, parts_of
from tfkit.tools.save.remote_code.proof import Folders, prove
from tfkit.tools.save.remote_code.tokenizer import complete_tokenizer

GENERATION = "generation_config.json"
START = "decoder_start_token_id"


def write_folder(
    model: fx.GraphModule,
    target: Path,
    spec: str,
    process: Folders,
    *,
    tokenizer: Sequence[Path] = (),
    weights_from: Path | None = None,
) -> None:
    """Write a model to an existing folder, and verify it with transformers.

    Args:
        model: the model.
        target: the folder.
        spec: the text of its spec.
        process: the process that verifies the folder.
        tokenizer: the files of the tokenizer.
        weights_from: the source of the weights. If it is a checkpoint of a run, the model card describes the run.
    """
    graph = graph_of(model)
    parts, code = parts_of(graph), code_of(graph)
    for file in tokenizer:
        shutil.copyfile(file, target / file.name)
    (target / PICTURE).write_text(picture_of(graph), encoding="utf-8")
    (target / CARD).write_text(model_card(parts, weights_from), encoding="utf-8")
    ids = complete_tokenizer(target, tokenizer, max_len(graph))
    if parts.last.memory is not None and weights_from is not None:
        ids |= _start(weights_from if weights_from.is_dir() else weights_from.parent)
    (target / SPEC).write_text(spec, encoding="utf-8")
    (target / f"modeling_{code.file}.py").write_text(code.modeling, encoding="utf-8")
    (target / f"configuration_{code.file}.py").write_text(code.configuration, encoding="utf-8")
    _write_json(target / CONFIG, {**_config(model, code, parts), **ids, SPEC_KEY: spec})
    if parts.decodes:
        _write_json(target / GENERATION, ids)
    metadata = safetensors_metadata(graph)
    for file in write_shards(transformers_map(model, graph), model.state_dict(), target, metadata=metadata):
        shutil.copymode(target / CONFIG, file)
    prove(model, parts, target, process)


def _config(model: fx.GraphModule, code: WrittenCode, parts: Parts) -> dict[str, Any]:
    """Return the contents of config.json."""
    dtypes = {name_of(tensor.dtype) for tensor in model.state_dict().values()}
    end = parts.task.class_name
    classes = {
        "AutoConfig": f"configuration_{code.file}.{code.name}Config",
        "AutoModel": f"modeling_{code.file}.{code.name}Model",
        f"AutoModel{parts.task.auto}": f"modeling_{code.file}.{code.name}{end or 'Model'}",
    }
    return {
        "architectures": [f"{code.name}{end or 'Model'}"],
        "auto_map": classes,
        "model_type": model_type(code.file),
        "dtype": dtypes.pop() if len(dtypes) == 1 else "float32",
        **(_labels(parts.head[-1]) if parts.head and parts.head[-1].config.head() is None else {}),
        **code.fields,
    }


def _start(folder: Path) -> dict[str, int]:
    """Return the start token of a decoder from the published files in a folder; empty if they have none."""
    files = [folder / name for name in (GENERATION, CONFIG)]
    configs = [read_object(file, max_bytes=MAX_CONFIG) for file in files if file.is_file()]
    ids = [config[START] for config in configs if type(config.get(START)) is int]
    return {START: ids[0]} if ids else {}


def _labels(classifier: Node) -> dict[str, Any]:
    """Return the fields of config.json for the labels and the problem type of a classifier."""
    fields, count = dict(classifier.config), classifier.output.width
    names = fields.get("labels") or [f"LABEL_{index}" for index in range(count or 0)]
    problem = fields.get("problem_type")
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}} | (
        {} if problem is None else {"problem_type": problem}
    )


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(f"{json.dumps(contents, indent=2)}\n", encoding="utf-8")

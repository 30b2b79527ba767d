"""The files of a folder that transformers opens: code, config, weights, generation config, tokenizer and model card."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import fx

from tfkit.arguments import name_of
from tfkit.building.builder import graph_of
from tfkit.checkpoint.config_json import further_fields, with_further_fields
from tfkit.checkpoint.fitting import safetensors_metadata
from tfkit.checkpoint.llama_names import LlamaNames
from tfkit.checkpoint.remote_code import transformers_map
from tfkit.checkpoint.weight_map import write_shards
from tfkit.errors import Diagnostic, NamesWarning, SpecError, listing
from tfkit.graph.expand import Node
from tfkit.graph.input_shapes import max_len
from tfkit.spec.folder import CONFIG, GENERATION, SPEC, SPEC_KEY
from tfkit.tools.common.companions import NO_COMPANIONS, PREPROCESSOR, START, Companions
from tfkit.tools.eject.remote_code.card import CARD, PICTURE, model_card, picture_of, verification
from tfkit.tools.eject.remote_code.modeling import WrittenCode, code_of, model_type
from tfkit.tools.eject.remote_code.parts import Parts, parts_of
from tfkit.tools.eject.remote_code.plan_proof import proved_plan
from tfkit.tools.eject.remote_code.proof import Folders, check_transformers, compare_folder
from tfkit.tools.eject.remote_code.tokenizer import complete_tokenizer
from tfkit.tools.save.layouts import Layout, ModelOrigin

SETTINGS = frozenset(
    """
    attn_implementation _attn_implementation cache_implementation chunk_size_feed_forward cross_attention_hidden_size
    gradient_checkpointing is_decoder is_encoder_decoder num_labels output_attentions output_hidden_states pruned_heads
    return_dict tie_encoder_decoder torchscript use_bfloat16 use_cache
    """.split()  # noqa: SIM905
)
"""Fields that control the code of a class in transformers, which is not the code of the folder."""
PAD = "pad_token_id"
PIXEL_MEAN = PIXEL_STD = (0.5, 0.5, 0.5)
"""Mean and standard deviation of the pixels, for a model whose weights come without an image processor."""
GENERATION_FIELDS = re.compile(
    r".*_token_id|bad_words_ids|max_length|min_length|num_beams|length_penalty|early_stopping|no_repeat_ngram_size|do_sample"
)
"""The fields of config.json that apply to generation, for a model without a generation config."""


class TransformersLayout(Layout):
    """The code of the model, which transformers opens with `trust_remote_code=True`."""

    name = "transformers"
    description = "the code of the model, for from_pretrained with trust_remote_code=True"
    files = (CARD, PICTURE, "modeling_*.py", "configuration_*.py")
    names = ("llama",)

    def write(self, model: fx.GraphModule, folder: Path, origin: ModelOrigin) -> None:
        check_transformers()
        parts = parts_of(graph_of(model))  # raises an error before the process starts
        if origin.names is not None:
            parts = replace(parts, names=llama_names_of(model, parts))
        with Folders() as process:
            if parts.names is not None:
                plan = proved_plan(model, parts, origin.plugins, process.scratch, _write_model)
                parts = replace(parts, plan=plan)
            companions, weights = origin.companions, origin.weights
            write_folder(model, folder, origin.spec, process, parts, companions=companions, weights_from=weights)


def write_folder(
    model: fx.GraphModule,
    target: Path,
    spec: str,
    process: Folders,
    parts: Parts | None = None,
    *,
    companions: Companions = NO_COMPANIONS,
    weights_from: Path | None = None,
) -> None:
    """Write a model to an existing folder, and verify it with transformers.

    Args:
        model: the model.
        target: the folder.
        spec: the text of its spec.
        process: the process that verifies the folder.
        parts: its parts, with the names of its modules; by default, the modules keep their names.
        companions: the files and fields of the published folder that the weights come from.
        weights_from: the source of the weights. If it is a checkpoint of a run, the model card describes the run.
    """
    graph = graph_of(model)
    parts = parts or parts_of(graph)
    if len(parts.bodies) > 1:
        companions = companions.with_start(graph.spec.family)
    image, has_processor = graph.inputs[parts.bodies[0].input], PREPROCESSOR in companions.files
    if image.type == "image" and not has_processor:
        companions = companions.with_image_processor(image, PIXEL_MEAN, PIXEL_STD)
    companions.write_files(target)
    (target / PICTURE).write_text(picture_of(graph), encoding="utf-8")
    ids = complete_tokenizer(target, companions.tokenizer_names, max_len(graph))
    # Only the fields that every class of transformers has: further fields are fields of a single class.
    further = further_fields(companions.fields, None)
    further = ids | {name: value for name, value in further.items() if name not in SETTINGS}
    has_start = any(further.get(name) is not None for name in (START, "bos_token_id"))
    (target / SPEC).write_text(spec, encoding="utf-8")
    _write_model(model, parts, target, {**further, SPEC_KEY: spec})
    if parts.decodes and GENERATION not in companions.files:
        generation = {key: further[key] for key in further if GENERATION_FIELDS.fullmatch(key)}
        write_json(target / GENERATION, _with_padding(generation))
    elif not SETTINGS.isdisjoint(companions.generation):
        write_json(target / GENERATION, {k: v for k, v in companions.generation.items() if k not in SETTINGS})
    verified = verification(parts, computed=compare_folder(model, parts, target, process))
    card = model_card(parts, weights_from, has_start=has_start, has_processor=has_processor, verified=verified)
    (target / CARD).write_text(card, encoding="utf-8")


def _write_model(
    model: fx.GraphModule, parts: Parts, target: Path, further: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write the code, the config.json with `further` fields, and the weights of a model."""
    code = code_of(parts.graph, parts.names, parts.plan)
    (target / f"modeling_{code.file}.py").write_text(code.modeling, encoding="utf-8")
    (target / f"configuration_{code.file}.py").write_text(code.configuration, encoding="utf-8")
    config = with_further_fields(_config_contents(model, code, parts), further)
    write_json(target / CONFIG, {**config, **code.fields})
    weights, metadata = transformers_map(model, parts.graph, parts.names), safetensors_metadata(parts.graph)
    for file in write_shards(weights, model.state_dict(), target, metadata=metadata):
        shutil.copymode(target / CONFIG, file)


def llama_names_of(model: fx.GraphModule, parts: Parts) -> LlamaNames:
    """Return the names of Llama for the modules of a model, and warn about sublayers that keep their names.

    Raise SpecError unless the model is a decoder in which an attention or an FFN has the projections of Llama.
    """
    graph, stack = parts.graph, parts.last.stack.stack
    names = LlamaNames.of(model, graph)
    layers = [] if stack is None else stack.layers
    roles = {step.role for layer in layers for step in layer.steps}
    reasons = [] if parts.decodes and len(parts.bodies) == 1 else ["it is not a decoder that predicts the next token"]
    if not reasons and not roles & {"attention", "ffn"}:
        reasons.append(f"its layers have only {listing(names.unnamed)}")
    if reasons:
        message = f"`{graph.name}` cannot be written with the names of Llama: {', '.join(reasons)}"
        raise SpecError(Diagnostic(message, help="write it without --names"))
    if names.unnamed:
        message = f"{listing(names.unnamed)} of `{graph.name}` keep the names of their projections"
        note = "Llama has q, k, v and o projections, and gate, up and down projections"
        warnings.warn(Diagnostic(message, notes=(note,)).warning(), NamesWarning, stacklevel=2)
    return names


def _with_padding(generation: dict[str, Any]) -> dict[str, Any]:
    """Return a generation config with a token for finished rows, by default the token that ends a text.

    Config.json does not have this token: collators would hide the end of each text from the loss.
    """
    end = generation.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    return generation if generation.get(PAD) is not None or not isinstance(end, int) else {**generation, PAD: end}


def _config_contents(model: fx.GraphModule, code: WrittenCode, parts: Parts) -> dict[str, Any]:
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
        **(_label_fields(parts.head[-1]) if parts.head and parts.head[-1].config.head() is None else {}),
        **code.fields,
    }


def _label_fields(classifier: Node) -> dict[str, Any]:
    """Return the fields of config.json for the labels and the problem type of a classifier."""
    fields, count = dict(classifier.config), classifier.output.width
    names = fields.get("labels") or [f"LABEL_{index}" for index in range(count or 0)]
    problem = fields.get("problem_type")
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}} | (
        {} if problem is None else {"problem_type": problem}
    )


def write_json(path: Path, contents: object) -> None:
    """Write a JSON file."""
    path.write_text(f"{json.dumps(contents, indent=2)}\n", encoding="utf-8")

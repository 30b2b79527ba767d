"""A published folder that is imported and saved again, with or without a short fine-tuning run in between."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import tfkit
from tfkit.checkpoint.config_json import SILENT
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.import_.importing import import_config
from tfkit.tools.save.save import save

from .case import AUTO, Case, reference
from .cases import CASES

NEW_TOKENS = 9
PENALTY = 1.25
PAD_OF_ONE = ("opt", "biogpt", "xglm")
"""Types whose classes use token 1 as padding, whatever the config has."""
PROMPT = "so it is so far"
WORDS = ["so", "it", "is", "far", "near", "not", "all", "of", "the", "words", "that", "a", "model", "may", "say"]
TEMPLATE = "{% for message in messages %}<user>{{ message.content }} ü{% endfor %}"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


TYPES = [
    name
    for name, case in CASES.items()
    if case.kind in ("causal", "seq2seq")
    and name == next(first for first, other in CASES.items() if other.model_type == case.model_type)
]
"""A case of each model type that generates."""


def round_trip(name: str, folder: Path, *, trained: bool) -> list[str]:
    """Return what differs after a published folder was imported and saved, with or without a run in between."""
    case, source, target = CASES[name], folder / "source", folder / "target"
    published(case, source)
    saved_again(case, source, target, run=folder / "run" if trained else None)
    return list(differences(case, source, target, trained=trained))


def published(case: Case, folder: Path) -> None:
    """Write a folder as transformers does, with ids, a generation config and a tokenizer unlike the class defaults."""
    config = {**case.config, "bos_token_id": 19, "eos_token_id": 18}
    if "num_decoder_layers" in config:  # the cache of transformers has as many layers as the encoder
        config["num_decoder_layers"] = config["num_layers"]
    pads = {"pad_token_id": 1 if case.model_type in PAD_OF_ONE else 17}
    starts = {"decoder_start_token_id": 16} if case.kind == "seq2seq" else {}
    model: Any = reference(replace(case, config={**config, **pads, **starts}))
    model.save_pretrained(folder)
    _tokenizer(model.config.pad_token_id).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)  # a class such as Qwen2Tokenizer splits the prompt differently
    model.generation_config = GenerationConfig(
        bos_token_id=19,
        eos_token_id=[_end(model, tokenizer), 18],
        pad_token_id=model.config.pad_token_id,
        repetition_penalty=PENALTY,
        max_new_tokens=NEW_TOKENS,
        **starts,
    )
    model.generation_config.save_pretrained(folder)


def _tokenizer(pad: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer of few words, whose special tokens have the ids of the config."""
    special = {19: "<begin>", 18: "<end>", pad: "<pad>", 16: "<start>", 20: "<unknown>"}
    free = [number for number in range(3, 3 + len(WORDS) + len(special)) if number not in special]
    vocabulary = dict(zip(WORDS, free, strict=False))
    vocabulary |= {text: number for number, text in special.items()}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 19)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<begin>",
        eos_token="<end>",
        pad_token="<pad>",
        unk_token="<unknown>",
        padding_side="left",
        model_max_length=77,
        chat_template=TEMPLATE,
    )


def _end(model: Any, tokenizer: Any) -> int:
    """Return a token at which the text of a model ends before the maximum length."""
    tokens = generated(model, tokenizer, eos_token_id=None, max_new_tokens=NEW_TOKENS, repetition_penalty=PENALTY)
    new = tokens[-NEW_TOKENS:]
    return next(token for token in reversed(new[: NEW_TOKENS // 2]) if token not in new[: new.index(token)])


def generated(model: Any, tokenizer: Any, **options: Any) -> list[int]:
    """Return the tokens that a model of transformers generates for the prompt."""
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        tokens: list[int] = model.generate(**inputs, do_sample=False, **options)[0].tolist()
    return tokens


def saved_again(case: Case, source: Path, target: Path, *, run: Path | None = None) -> None:
    """Import a folder and save it, after a fine-tuning run in the folder `run` if it is set."""
    imported = import_config(source, family=case.family)
    if run is not None:
        tfkit.train(fine_tuning(case, imported.text, source, run.parent), output=run, quiet=True)
        graph, weights = tfkit.load(run), run
    else:
        graph, weights = tfkit.loads(imported.text), source
    model = build_with_weights(graph, weights)
    save(model, target, layout="huggingface", allow_drop=True)


def fine_tuning(case: Case, spec: str, source: Path, folder: Path) -> dict[str, Any]:
    """Return a run of two steps that continues with the weights and the tokenizer of a folder."""
    tokenizer = {"kind": "pretrained", "path": str(source)}
    (folder / "model.yaml").write_text(spec, encoding="utf-8")
    if case.kind == "seq2seq":
        rows = [{"source": " ".join(WORDS[n:8]), "target": " ".join(WORDS[:n])} for n in range(3, 7)] * 3
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        data = {"kind": "pairs", "files": str(folder / "rows.jsonl"), "start": 16, "end": 18}
    else:
        (folder / "text.txt").write_text(" ".join(WORDS * 20), encoding="utf-8")
        data = {"kind": "text", "files": str(folder / "text.txt")}
    return {
        "tfkit": 1,
        "name": "tuned",
        "model": str(folder / "model.yaml"),
        "weights": {"path": str(source), "unused": ["*"]} if case.leaves_out else str(source),
        "data": {**data, "tokenizer": tokenizer},
        "batch": {"sequences": 2, "length": 9},
        "steps": 2,
        "optimizer": {"kind": "adamw", "lr": 1e-3},
    }


def differences(case: Case, source: Path, target: Path, *, trained: bool) -> Iterator[str]:
    """Yield what differs between two folders that transformers opens."""
    for at in ("", "encoder", "decoder"):
        configs = [AutoConfig.from_pretrained(folder).to_dict() for folder in (source, target)]
        inner = [config.get(at) if at else config for config in configs]
        yield from _unequal("config", *(_silent(values if isinstance(values, dict) else {}) for values in inner))
    models = [AUTO[case.kind].from_pretrained(folder).eval() for folder in (source, target)]
    yield from _unequal("generation", *(_plain(model.generation_config.to_dict()) for model in models))
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (source, target)]
    yield from _unequal("tokenizer", *(_tokenizer_facts(tokenizer) for tokenizer in tokenizers))
    for name in TOKENIZER_FILES:
        files = [folder / name for folder in (source, target)]
        contents = [file.read_bytes() if file.exists() else None for file in files]
        # A run has the tokenizer that AutoTokenizer makes of the file, which a class such as Qwen2Tokenizer changes.
        if contents[0] != contents[1] and not (trained and name == "tokenizer.json"):
            yield f"file {name}"
    if not trained:
        texts = [generated(model, tokenizer) for model, tokenizer in zip(models, tokenizers, strict=True)]
        if texts[0] != texts[1]:
            yield f"generated: {texts[0]} {texts[1]}"
        stops = models[0].generation_config.eos_token_id
        if texts[0][-1] not in stops:
            yield f"generated: {texts[0]} does not stop"


def _silent(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that no spec contains; the remaining fields have several spellings."""
    return {
        name: value
        for name, value in values.items()
        if name in SILENT - {"dtype", "_name_or_path"} or name.endswith("_token_id")
    }


def _tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "so near"}]
    return {
        "vocabulary": tokenizer.get_vocab(),
        "special": tokenizer.special_tokens_map,
        "template": tokenizer.apply_chat_template(messages, tokenize=False),
        "ids": tokenizer(["so it", "not all of it"], padding=True)["input_ids"],
        "length": tokenizer.model_max_length,
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without those that describe the file."""
    return {name: value for name, value in values.items() if name != "transformers_version"}


def _unequal(what: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({**left, **right}):
        if left.get(name) != right.get(name):
            yield f"{what} {name}: {left.get(name)} {right.get(name)}"

"""Cases made of others: every class that transformers has for a model type, and fields away from their defaults."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from tfkit.errors import SpecError
from tfkit.tools.import_.importing import import_config

from .case import AUTO, CLASSES, Case, Kind
from .changed_fields import changes, quiet

NAMES: dict[Kind, Mapping[str, str]] = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "sequence": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "question": auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "pretraining": auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
}
"""The names of classes by kind and model type."""
MEMORY = {"*.encoder_attn*": "not read without an encoder"}
HEADLESS = ("bos_token_id", "eos_token_id", "vocab_size", "tie_word_embeddings", "pad_token_id")
"""Fields that stay as the case has them: tests draw tokens by them, and files of both kinds of ties are cases."""


def classes(model_type: str) -> dict[Kind, str]:
    """The classes that transformers has for a model type, each once, by the kinds of their heads."""
    found: dict[str, Kind] = {}
    for kind, names in NAMES.items():
        if model_type in names:
            found.setdefault(names[model_type], kind)
    return {kind: name for name, kind in found.items()}


def served(name: str, case: Case) -> Iterator[tuple[str, Case]]:
    """A case with each other head of its model type."""
    for kind in classes(case.model_type):
        if kind == case.kind or (kind == "masked" and case.kind == "seq2seq"):
            continue
        made = replace(case, kind=kind, prepare=None, buffers={})
        if kind == "causal" and case.kind == "masked":
            made = replace(made, config={**case.config, "is_decoder": True})
        if kind == "causal" and case.kind == "seq2seq":  # their cache counts the layers of the encoder
            made = replace(made, config={**case.config, "use_cache": False}, uncounted={**case.uncounted, **MEMORY})
        if kind == "sequence" and case.model_type == "t5gemma":  # theirs reads where the next token of the source were
            made = replace(made, sides=("none",))
        yield f"{name}-{kind}", made


def heads(cases: dict[str, Case]) -> dict[str, Case]:
    """All cases with each of the other heads, by name and kind."""
    return {key: made for name, case in cases.items() for key, made in served(name, case)}

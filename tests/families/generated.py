"""Cases derived from other cases: each class of transformers for a model type, and fields with unusual values."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import nn
from transformers.models.auto import modeling_auto as auto

from tfkit.errors import SpecError

from .case import Case, Kind, Trial, check_cached, check_count, check_logits, check_saved
from .cases import CASES
from .changed_fields import changes, quiet, runnable
from .test_changed_fields import excepted

Outcome = Literal["passed", "refused", "wrong", "crashed"]
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
FIXED_FIELDS = ("vocab_size", "pad_token_id", "type_vocab_size", "use_task_id", "is_decoder", "tie_word_embeddings")
"""Fields by which the tests choose what they give and ask for, or by which the files of theirs do not go."""


def classes(model_type: str) -> dict[Kind, str]:
    """The classes that transformers has for a model type, each once, by the kinds of their heads."""
    result: dict[str, Kind] = {}
    for kind, names in NAMES.items():
        if model_type in names and (kind != "pretraining" or names[model_type].endswith("ForPreTraining")):
            result.setdefault(names[model_type], kind)
    return {kind: name for name, kind in result.items()}


def served(name: str, case: Case) -> Iterator[tuple[str, Case]]:
    """A case with each other head of its model type."""
    for kind, cls in classes(case.model_type).items():
        if cls == NAMES[case.kind].get(case.model_type):
            continue
        # RoCBERT's class for pretraining has a pooler without reading it.
        pooled = kind == "sequence" or (kind == "pretraining" and case.model_type != "roc_bert")
        unread = {key: why for key, why in case.uncounted.items() if not pooled or "pooler" not in key}
        prepare = None if case.kind == "seq2seq" else case.prepare  # `untie` needs the head
        leaves_out = case.leaves_out and (bool(unread) or not case.uncounted)
        variant = replace(case, kind=kind, prepare=prepare, uncounted=unread, leaves_out=leaves_out)
        if kind == "causal" and case.kind == "masked":
            variant = replace(variant, config={**case.config, "is_decoder": True})
        if kind == "causal" and case.kind == "seq2seq":  # their cache counts the layers of the encoder
            layers = {"encoder_layers": case.config["decoder_layers"]}
            unread |= MEMORY
            variant = replace(variant, config={**case.config, **layers}, uncounted=unread, buffers={}, leaves_out=True)
        if kind == "sequence" and case.model_type == "t5gemma":  # theirs reads where the next token of the source were
            variant = replace(variant, sides=("none",))
        yield f"{name}-{kind}", variant


HEADS = {key: variant for name, case in CASES.items() for key, variant in served(name, case)}
"""All cases with each of the other heads, by name and kind."""


def varied(name: str, case: Case, folder: Path, tries: int) -> Case:
    """A case with other values of some fields, drawn in so many tries, that transformers and the family both take."""
    options = [value for value in changes(case) if value.field not in FIXED_FIELDS and not excepted(f"{name} {value}")]
    random.Random(name).shuffle(options)
    done: set[str] = set()
    for change in options[:tries]:
        tried = replace(case, config={**case.config, change.field: change.value})
        if change.field not in done and _accepted(tried, folder):
            case = tried
            done.add(change.field)
    return replace(case, std=0.6 * case.std)  # more and wider layers would round more


def _accepted(case: Case, folder: Path) -> bool:
    """True if transformers runs the model, and we can load it."""
    try:
        with quiet():
            theirs = runnable(case)
            if buffers(theirs, case) != {*case.buffers}:
                return False
            Trial.read(case, theirs, folder)
    except Exception:  # transformers says in many ways that it cannot
        return False
    return True


def buffers(theirs: nn.Module, case: Case) -> set[str]:
    """The buffers of a model that are called as those of a case."""
    kinds = {name.rpartition(".")[2] for name in case.buffers}
    return {name for name, _ in theirs.named_buffers() if name.rpartition(".")[2] in kinds}


def outcome(case: Case, folder: Path) -> tuple[Outcome, str]:
    """The outcome of all that one saved model tells, and the reason."""
    try:
        prove(case, folder)
    except SpecError as error:
        return "refused", error.diagnostics[0].message
    except AssertionError as error:
        return "wrong", str(error).strip().partition("\n")[0] or "an assertion without words"
    except Exception as error:
        return "crashed", repr(error)
    return "passed", ""


def prove(case: Case, folder: Path) -> None:
    """Import and load a model of theirs, run it with padding and with a cache, save it, and let them open it."""
    trial = Trial.of(case, folder)
    for side in case.sides:
        check_logits(trial, side)
    if case.kind in ("causal", "seq2seq") and case.cached:
        check_cached(trial)
    check_count(trial)
    check_saved(trial)

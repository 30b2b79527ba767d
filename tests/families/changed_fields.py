"""Changes of single fields of a config.json: tfkit's model changes if and only if transformers' model changes."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import torch
import transformers
from torch import nn

from tfkit.errors import SpecError
from tfkit.tools.import_.importing import import_config

from .case import Case, Trial, check_logits, reference
from .cases import CASES, earlier

Verdict = Literal["equal", "refused", "illegal", "silent", "wrong", "crashed"]
NOT_THE_MODEL = frozenset(
    """
    architectures model_type transformers_version dtype torch_dtype id2label label2id problem_type name_or_path
    _name_or_path bos_token_id eos_token_id sep_token_id cls_token_id return_dict output_attentions output_hidden_states
    chunk_size_feed_forward use_cache forced_bos_token_id forced_eos_token_id decoder_start_token_id
    task_specific_params initializer_range initializer_factor init_std tokenizer_class is_encoder_decoder num_labels
    """.split()  # noqa: SIM905
)
"""Fields that say nothing about what a model with given weights computes."""
TOLERANCE = 1e-3
"""The largest difference of equal logits: sizes that were doubled round more."""
ACTIVATIONS = ("gelu", "relu", "silu", "gelu_new", "quick_gelu")


@dataclass(frozen=True)
class Change:
    """A field with another value."""

    field: str
    value: Any

    def __str__(self) -> str:
        return f"{self.field}={self.value!r}"


def changes(case: Case) -> Iterator[Change]:
    """Every field of the case's config with one or two other values."""
    config = transformers.AutoConfig.for_model(case.model_type, **deepcopy(dict(case.config)))
    for field, value in config.to_dict().items():
        if field not in NOT_THE_MODEL:
            yield from (Change(field, other) for other in others(field, value))


def others(field: str, value: Any) -> Iterator[Any]:
    """One or two other values of a field, of the same type."""
    match value:
        case bool():
            yield not value
        case int():
            if field == "pad_token_id":  # tokens are drawn from 3 on
                yield from {0, 2} - {value}
            else:
                yield from (value * 2, max(1, value // 2)) if value > 1 else (1 - value,)
        case float():
            yield value * 0.5 if value else 0.3
        case str() if value in ACTIVATIONS or "act" in field:
            yield "relu" if value != "relu" else "gelu"
        case list() if value:
            yield value[::-1]
            yield value[:-1]
        case dict():
            names = [key for key in value if isinstance(key, str)]
            yield from ({**value, key: other} for key in names for other in others(key, value[key]))
        case None:
            yield from (True, 2, 0.5)


def verdict(case: Case, change: Change, folder: Path) -> tuple[Verdict, str]:
    """The outcome of a change, and the reason; with the padding of the case that is hardest to get right."""
    changed = replace(case, config={**deepcopy(dict(case.config)), change.field: change.value})
    if change.field == "type_vocab_size":
        changed = replace(changed, token_types=change.value)
    if change.field == "tie_word_embeddings":  # some classes have parameters that an untied head does not read
        changed = replace(changed, leaves_out=None)
    try:
        with quiet():
            theirs = runnable(changed)
    except Exception as error:  # transformers says in many ways that it cannot
        return "silent" if _is_passed_over(case, changed, folder) else "illegal", repr(error)
    try:
        with quiet():
            trial = Trial.read(changed, theirs, folder)
    except SpecError as error:
        return "refused", str(error)
    except Exception as error:
        return "crashed", repr(error)
    try:
        with quiet():
            check_logits(trial, case.sides[-1], TOLERANCE)
    except AssertionError as error:
        return "wrong", str(error).strip().splitlines()[0]
    except Exception as error:
        return "crashed", repr(error)
    return "equal", ""


def _is_passed_over(case: Case, changed: Case, folder: Path) -> bool:
    """Return True if a config.json that transformers reads, and cannot run, imports as the model without the change."""
    try:
        return _spec_text(changed, folder) == _spec_text(case, folder / "unchanged")
    except Exception:  # transformers rejects the value, or the family does
        return False


def _spec_text(case: Case, folder: Path) -> str:
    """Return the spec that the config.json of a case imports as."""
    config = transformers.AutoConfig.for_model(case.model_type, **deepcopy(dict(case.config)))
    config.save_pretrained(folder)
    return import_config(folder, family=case.family, name="model").text


def runnable(case: Case) -> nn.Module:
    """Their model; raises whatever transformers says of a config that it cannot be made or run with."""
    model = reference(case)
    ids = torch.randint(3, 40, (2, case.length))
    with torch.no_grad():
        logits = model(ids, **({"decoder_input_ids": ids} if case.kind == "seq2seq" else {})).logits
    if logits.std() < 100 * TOLERANCE:
        raise ValueError("outputs so small that everything is near")
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is printed: transformers warns of much."""
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def outcomes(name: str, folder: Path) -> Mapping[str, tuple[Verdict, str]]:
    """The outcome of each change of a case, but for numbers that an earlier case of its family has tried.

    A switch or a word may mean another thing in each case.
    """
    before = (change for other in earlier(name) for change in changes(CASES[other]))
    tried = {str(change) for change in before if type(change.value) in (int, float)}
    untried = spread(name, [change for change in changes(CASES[name]) if str(change) not in tried])
    return {str(change): verdict(CASES[name], change, folder / str(number)) for number, change in enumerate(untried)}


def spread(name: str, changes: list[Change]) -> Iterator[Change]:
    """These changes, but that a size is doubled in some families, and halved in the others."""
    fields: dict[str, list[Change]] = {}
    for change in changes:
        fields.setdefault(change.field, []).append(change)
    for field, actual in fields.items():
        is_size = field != "pad_token_id" and all(type(change.value) is int for change in actual)
        yield from [actual[crc32(f"{name} {field}".encode()) % len(actual)]] if is_size else actual

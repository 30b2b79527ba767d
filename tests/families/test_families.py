"""Every family: a small model of transformers, imported from its config.json and loaded by the weight map."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import tfkit

from ..known import KNOWN
from ..sampling import chosen, some
from .case import Trial
from .cases import CASES, QUICK_CASES
from .generated import prove

transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("name", chosen(CASES, QUICK_CASES))
def test_a_published_model_is_exactly_this(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One test for all that one saved model tells: to make and to load it takes the time."""
    prove(CASES[name], tmp_path_factory.mktemp(name))


@pytest.mark.parametrize("name", some(sorted(KNOWN.by_model_type), 12))
def test_defaults_are_those_of_the_config_class(name: str) -> None:
    """A field that a config.json leaves out has the value that it has there."""
    family = tfkit.load(KNOWN.by_model_type[name]).spec.family
    assert family is not None
    theirs = transformers.AutoConfig.for_model(name)
    theirs.allow_global_per_layer_attribute_access = True  # Gemma 4 has sizes that differ by layer
    for field, value in family.defaults.items():
        plain = family.fields[field].kind_name() not in ("rope", "layer_types", "only", "unused", "layer_numbers")
        plain = plain and (name, field) != ("mistral3", "tie_word_embeddings")  # published files, of version 4, lack it
        if plain and value is not None and hasattr(theirs, field):  # null follows from other fields
            assert value == getattr(type(theirs), field, getattr(theirs, field)), field


@torch.no_grad()
def test_without_token_types_all_are_of_the_first_type(tmp_path: Path) -> None:
    trial = Trial.of(CASES["bert"], tmp_path)
    ids = torch.randint(3, 61, (3, trial.case.length))
    torch.testing.assert_close(trial.ours(ids), trial.theirs(ids).logits, rtol=1e-5, atol=1e-5)


INNER = """
tfkit: 1
name: small
d_model: 8
vocab_size: 11
graph: {embedding: {block: embedding}}
checkpoint:
  model_type: outer
  architecture: OuterModel
  tensors: {}
  families:
    text_config:
      model_type: inner
      architecture: InnerModel
      prefix: text.body.
      tensors: {embedding.tokens: {".[a b].weight": "(p i) -> (i p)"}, norm: .norm, head: output}
      extra: {.old.weight: = .norm.weight, .older: -> .norm, .unused: The training does not need it., outside: Unused.}
"""


def test_names_of_an_inner_family_continue_its_prefix() -> None:
    family = tfkit.loads(INNER).spec.family
    assert family is not None
    pattern = {"text.body.[a b].weight": "(p i) -> (i p)"}
    assert family.tensors == {"embedding.tokens": pattern, "norm": "text.body.norm", "head": "output"}
    assert family.copies == {"text.body.old.weight": "text.body.norm.weight"}
    assert family.older == {"text.body.older": "text.body.norm"}
    assert [*family.ignored] == ["text.body.unused", "outside"]

"""Each of the faults of a new plugin causes a message that describes the fault."""

from __future__ import annotations

from typing import Any, Literal

import pytest

import tfkit
from tfkit.component import Component
from tfkit.testing import check_component
from tfkit.tools.check.components import options_of

from .models import RetentionConfig
from .newcomer import (
    AttentionOfANewcomer,
    FFNOfANewcomer,
    IgnoresItsMemory,
    MisspeltChunks,
    MixerOfANewcomer,
    UndeclaredChunks,
    WrongCount,
)

PLUGINS = tfkit.load_plugins(entry_points=False)
WINDOW = {"mask": {"left": 3, "right": 0}}
FAULTS: dict[str, tuple[type[Component], dict[str, Any], str, str]] = {
    "ignores padding": (
        AttentionOfANewcomer,
        {"core": "IgnoresPadding"},
        "padding",
        ", and so do its contents: it is not masked",
    ),
    "counts padding": (
        AttentionOfANewcomer,
        {"core": "CountsPadding"},
        "padding",
        ", whatever it contains: positions count it, as absolute positions do",
    ),
    "ignores its memory": (
        IgnoresItsMemory,
        {},
        "memory",
        "the memory is not read: the output is equal with a different memory",
    ),
    "looks one token ahead": (AttentionOfANewcomer, {"core": "LooksAhead"}, "look-ahead", "the model looks ahead: "),
    "other numbers with a cache": (
        AttentionOfANewcomer,
        {"core": "DiffersWithACache"},
        "cached",
        "read in uneven steps, column 3 differs from the full forward by",
    ),
    "window one off": (
        AttentionOfANewcomer,
        {"core": "WindowOneOff", **WINDOW},
        "extents",
        "query 1 does not read key 0, mask left 3, right 0",
    ),
    "not scriptable": (AttentionOfANewcomer, {"core": "DoesNotScript"}, "script", "cannot be scripted by TorchScript"),
    "bias lost in bfloat16": (FFNOfANewcomer, {"ffn": "LosesItsBias"}, "rounding", ", but rounding explains 0.05"),
    "depends on its neighbours": (
        AttentionOfANewcomer,
        {"core": "DependsOnItsNeighbours"},
        "neighbours",
        "beside other rows, the first one of a batch changes by",
    ),
    "changes its input": (
        AttentionOfANewcomer,
        {"core": "ChangesItsInput"},
        "unchanged-inputs",
        "`stack.layers.0.attention.core` changes its input by",
    ),
    "dead half": (FFNOfANewcomer, {"ffn": "DeadHalf"}, "every-row", "rows of `stack.layers.0.ffn.up.weight` have no"),
    "wrong count kept": (WrongCount, {}, "cached", "read in steps, it fails; does `cached` declare what is cached?"),
    "forgets at a chunk": (
        MixerOfANewcomer,
        {"mixer": "ForgetsAtChunks"},
        "cached",
        "read in uneven steps, columns 4 to 5 differ from the full forward by",
    ),
    "goes on with a document at a chunk": (
        MixerOfANewcomer,
        {"mixer": "MissesDocumentsAtChunks"},
        "documents",
        "a document in a row with others changes by",
    ),
    "forgets at position 64": (
        MixerOfANewcomer,
        {"mixer": "ForgetsAt64"},
        "chunks",
        "read token by token, where a chunk has 64, column 64 differs from the full forward by",
    ),
    "does not declare its chunks": (
        UndeclaredChunks,
        {},
        "chunks",
        "read in steps of 5, where a chunk has 64, columns 60 to 64 differ from the full forward by",
    ),
    "declares no chunk": (
        MisspeltChunks,
        {},
        "chunks",
        "`chunk_attributes` declares `stack.layers.0.mixer.inner.chunk`, which is not a positive integer",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_named(fault: str) -> None:
    config, fields, red, words = FAULTS[fault]
    if issubclass(config, AttentionOfANewcomer):
        fields = {"n_heads": 2, **fields}
    within = {"padding": "encoder", "memory": "memory"}.get(red, "decoder")
    with pytest.raises(AssertionError) as caught:
        check_component(config, fields=fields, within=[within], plugins=PLUGINS, only=[red])
    line = str(caught.value).splitlines()[1]
    assert line.startswith(f"- {red}, in ")
    assert words in line


class Fields(tfkit.FFNConfig):
    """Fields that are null by default."""

    kind: Literal["fields"] = "fields"
    number: tfkit.PositiveFloat | None = None
    rate: tfkit.Probability | None = None
    count: tfkit.Count | None = None
    factor: float | None = None
    word: Literal["a", "b"] | None = None
    switch: bool | None = None
    norm: tfkit.NormConfig | None = None


def test_fields_that_are_null_by_default_are_set() -> None:
    assert options_of(Fields) == {
        "number": [None, 0.5],
        "rate": [None, 0.5],
        "count": [None, 4],
        "factor": [None, 2.0],
        "word": [None, "a", "b"],
        "switch": [None, False, True],
    }


def test_a_core_that_ignores_its_softcap() -> None:
    options = {"softcap": options_of(AttentionOfANewcomer)["softcap"]}
    fields = {"n_heads": 2, "dropout": 0.0}
    with pytest.raises(AssertionError, match=r"`stack.attention.softcap` has no effect: other values than 0.5"):
        check_component(
            AttentionOfANewcomer, fields=fields, options=options, within=["decoder"], plugins=PLUGINS, only=["values"]
        )


def test_the_right_mixer_is_not() -> None:
    check_component(MixerOfANewcomer, within=["decoder"], plugins=PLUGINS, only=["documents", "chunks"])


def test_the_right_one_is_not() -> None:
    only = [red for config, _, red, _ in FAULTS.values() if config is AttentionOfANewcomer]
    check_component(AttentionOfANewcomer, fields={"n_heads": 2}, within=["decoder"], plugins=PLUGINS, only=only)


def test_a_product_of_keys_and_values_reads_its_memory() -> None:
    fields = {"n_heads": 2, "bias": False}
    check_component(RetentionConfig, fields=fields, within=["memory"], plugins=PLUGINS, only=["memory"])

"""Specs as Python mappings: read like the same text, with errors that name the path in the mapping."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum, StrEnum
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import tfkit
from tfkit.errors import MAX_ERRORS
from tfkit.plugin.manager import Plugins
from tfkit.spec.tree import MAX_DEPTH, MAX_NODES

from ..known import KNOWN, NAMES
from ..sampling import some

TINY: dict[str, Any] = {
    "tfkit": 1,
    "name": "tiny",
    "d_model": 16,
    "vocab_size": 50,
    "max_len": 8,
    "graph": {
        "embedding": {"block": "embedding", "position": "learned"},
        "decoder": {
            "block": "decoder",
            "n_layers": 2,
            "attention": {"kind": "mha", "n_heads": 4},
            "ffn": {"kind": "gelu", "d_ff": "4 * d_model"},
            "norm": {"kind": "layernorm", "eps": 1e-5},
        },
        "logits": {"block": "lm_head", "tie": "embedding"},
    },
}
ATTENTION = "graph.decoder.attention"


class Words(StrEnum):
    """Words that are strings, as settings have them."""

    MHA = "mha"


class Sizes(IntEnum):
    """Sizes that are numbers."""

    HEADS = 4


def changed(*changes: tuple[str, Any]) -> dict[str, Any]:
    """`TINY` with other values at dotted paths; `...` removes one."""
    spec = copy.deepcopy(TINY)
    for path, value in changes:
        *around, last = path.split(".")
        inner = spec
        for key in around:
            inner = inner[key]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
    return spec


def circle() -> dict[str, Any]:
    inner: dict[str, Any] = {"block": "norm"}
    inner["norm"] = [inner]
    return inner


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


WRONG: dict[str, Any] = {
    "not_a_value": [
        changed((f"{ATTENTION}.n_heads", torch.tensor(4))),
        changed((f"{ATTENTION}.mask", {4, 5})),
        changed((f"{ATTENTION}.kind", b"mha")),
        changed((f"{ATTENTION}.kind", torch.nn.Linear)),
        changed(("graph.decoder.layers", {"pattern": np.arange(2)})),
    ],
    "not_finite": [changed(("dropout", math.nan)), changed(("dropout", -math.inf))],
    "absurd": changed(("d_model", 10**5000)),
    "key_a_number": changed((f"{ATTENTION}.mask", {4: 5})),
    "key_at_the_top": {**TINY, None: 1},
    "merge_key": changed(("graph.<<", {"norm": "rmsnorm"})),
    "circle": changed(("graph.decoder", circle())),
    "too_deep": changed(("graph.decoder", nested(MAX_DEPTH))),
    "too_many": changed(("graph.decoder", [1] * MAX_NODES)),
    "several": changed(("graph.decoder", {1: 2, "norm": object(), "dropout": math.inf})),
    "value": changed((f"{ATTENTION}.n_heads", "four")),
    "number_as_text": changed((f"{ATTENTION}.n_heads", "4")),
    "true_is_not_1": changed((f"{ATTENTION}.n_heads", True)),
    "none": changed((f"{ATTENTION}.n_heads", None)),
    "relation": changed((f"{ATTENTION}.n_heads", 5)),
    "kind": changed((ATTENTION, "mqh")),
    "kind_on_two_lines": changed((ATTENTION, "mha\n")),
    "key": changed((f"{ATTENTION}.n_head", 5)),
    "key_misplaced": changed((f"{ATTENTION}.n_heads", ...), ("graph.decoder.n_heads", 4)),
    "missing": changed((f"{ATTENTION}.n_heads", ...)),
    "missing_at_the_top": changed(("tfkit", ...)),
    "arithmetic": changed(("graph.decoder.ffn.d_ff", "4 * d_modle")),
    "item": changed(("graph.decoder.layers", {"pattern": ["base", "wide"]})),
    "wire": changed(("graph.logits.input", "decodre")),
    "extends": {"extends": "gpt3", "name": "mine"},
    "inherited": {"extends": "gpt2", "name": "mine", "graph": {"decoder": {"attention": {"n_heads": 5}}}},
    "base": {"extends": "wrong.yaml", "name": "mine", "d_modle": 16},
    "empty": {},
}


def same(a: tfkit.Graph, b: tfkit.Graph) -> bool:
    return (a.spec.model, a.inputs, a.nodes, a.outputs) == (b.spec.model, b.inputs, b.nodes, b.outputs)


@pytest.mark.parametrize("name", WRONG)
def test_wrong(
    name: str,
    plugins: Plugins,
    golden: Callable[[str, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.yaml").write_text("tfkit: 1\nname: wrong\ngraph: {norm: {block: norm, kid: 1}}\n", encoding="utf-8")
    texts = []
    for data in WRONG[name] if isinstance(WRONG[name], list) else [WRONG[name]]:
        with pytest.raises(tfkit.SpecError) as caught:
            tfkit.load(data, plugins=plugins)
        texts.append(str(caught.value))
    golden(f"data/{name}", "\n".join(texts))


@pytest.mark.parametrize("name", some(NAMES, 15))
def test_a_shipped_spec_as_data(name: str) -> None:
    """As PyYAML reads it, which takes `1e-5` for text."""
    text = KNOWN.files[name].path.read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    before = copy.deepcopy(data)
    assert same(tfkit.load(data), tfkit.load(name))
    assert data == before


def test_values_of_other_types(plugins: Plugins) -> None:
    spec = changed(
        (f"{ATTENTION}.kind", Words.MHA),
        (f"{ATTENTION}.n_heads", Sizes.HEADS),
        ("d_model", np.int64(16)),
        ("dropout", np.float32(0.25)),
        ("graph.decoder.dropout", Fraction(1, 4)),
        ("inputs", ("tokens",)),
        ("graph.decoder", OrderedDict(TINY["graph"]["decoder"])),
    )
    expected = changed(("dropout", 0.25), ("graph.decoder.dropout", 0.25), ("inputs", ["tokens"]))
    spec["graph"]["decoder"]["dropout"] = Fraction(1, 4)
    actual = tfkit.load(MappingProxyType(spec), plugins=plugins)
    assert same(actual, tfkit.load(expected, plugins=plugins))
    assert type(actual.node("decoder").config.attention.n_heads) is int
    assert type(actual.spec.model.graph["embedding"].d_model) is int


def test_text_is_text_where_text_belongs(plugins: Plugins) -> None:
    actual = tfkit.load(changed(("name", "12"), ("description", "true")), plugins=plugins)
    assert (actual.name, actual.spec.model.description) == ("12", "true")


def test_one_value_in_two_places(plugins: Plugins) -> None:
    norm = {"kind": "rmsnorm"}
    actual = tfkit.load(changed(("graph.embedding.norm", norm), ("graph.decoder.norm", norm)), plugins=plugins)
    assert [actual.node(name).config.norm.kind_name() for name in ("embedding", "decoder")] == ["rmsnorm"] * 2


def test_errors_have_an_end(plugins: Plugins) -> None:
    with pytest.raises(tfkit.SpecError) as caught:
        tfkit.load(changed(("graph.decoder", [object()] * 100)), plugins=plugins)
    assert len(caught.value.diagnostics) == MAX_ERRORS
    assert caught.value.diagnostics[-1].notes == (f"reading stopped after {MAX_ERRORS} errors",)


def test_changes(plugins: Plugins) -> None:
    actual = tfkit.load(TINY, sets={"decoder.n_layers": 1}, plugins=plugins)
    assert actual.node("decoder").config.n_layers == 1
    with pytest.raises(tfkit.SpecError, match=r"--set:1:20"):
        tfkit.load(TINY, sets="decoder.n_layers=  none", plugins=plugins)


def test_other_functions_take_it_too() -> None:
    assert tfkit.count_params(TINY).total == sum(p.numel() for p in tfkit.build(TINY).parameters())
    assert tfkit.compare(TINY, TINY).first is None


def test_an_error_as_data(plugins: Plugins) -> None:
    with pytest.raises(tfkit.SpecError) as caught:
        tfkit.load(WRONG["value"], plugins=plugins)
    (error,) = caught.value.diagnostics
    location = {key: error.to_dict()[key] for key in ("file", "line", "column", "path")}
    assert location == {"file": None, "line": None, "column": None, "path": f"{ATTENTION}.n_heads"}

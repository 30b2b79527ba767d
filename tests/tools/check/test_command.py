"""`tfkit check` in a terminal: the table, broken properties and components, the command to rerun, the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tfkit
from tfkit.tools.check.check import Checked, Work, worst_of
from tfkit.tools.check.components import SLOTS
from tfkit.tools.check.measure import Deviation, Outcome, property_of
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.properties import all as all_properties
from tfkit.tools.check.properties import forms, numbers

from ...sampling import some

Run = Callable[..., str]
BROKEN = '''
"""Attention that reads one token ahead."""

from typing import Literal

import torch
from torch import nn

import tfkit
from tfkit.nn import Softmax


class Ahead(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.softmax = scale, Softmax()

    def forward(self, q, k, v, mask):
        if mask is not None:
            mask = torch.cat((mask[..., :1], mask[..., :-1]), dim=-1)
        return self.softmax(q @ k.mT * self.scale, mask) @ v


class AheadConfig(tfkit.MultiHeadConfig):
    """One token ahead."""

    kind: Literal["ahead"] = "ahead"

    def build_core(self, make, *, causal):
        return Ahead(self.head_width**-0.5)


@tfkit.hookimpl
def tfkit_register(register):
    register(AheadConfig)
'''


BENT = '''
"""An activation."""

from typing import Literal

from torch import nn

import tfkit


class BentConfig(tfkit.ActivationConfig):
    """The hyperbolic tangent."""

    kind: Literal["bent"] = "bent"

    def build(self, make):
        return nn.Tanh()


@tfkit.hookimpl
def tfkit_register(register):
    register(BentConfig)
'''


@pytest.fixture
def ahead(specs: Path) -> str:
    """A spec with an attention that looks ahead, and the option that finds it."""
    (specs / "plugins").mkdir()
    (specs / "plugins" / "ahead.py").write_text(BROKEN)
    text = (specs / "tiny.yaml").read_text().replace("gqa", "ahead").replace(", n_kv_heads: 2", "")
    (specs / "ahead.yaml").write_text(text)
    return "--plugin-dir=plugins"


def test_a_model_that_holds(run: Run, specs: Path) -> None:
    lines = run("check", "tiny.yaml", "--only", "padding", "--only", "extents").splitlines()
    assert lines[0].startswith("tiny, as a reduced model: ")
    assert [line.split()[:2] for line in lines[4:6]] == [["extents", "ok"], ["padding", "ok"]]
    assert lines[-1].startswith("2 ok: ")


def test_a_model_that_does_not(run: Run, ahead: str) -> None:
    only = [f"--only={name}" for name in ("look-ahead", "look-ahead-gradient", "extents")]
    text = run("check", "ahead.yaml", *only, ahead, status=1)
    first = next(line for line in text.splitlines() if line.startswith("look-ahead:"))
    assert "layers.0.attention" in first
    assert "the model looks ahead: outputs before position 1 change" in text.replace("\n", " ")
    assert "follows from `look-ahead`" in text
    assert (
        "again: tfkit check ahead.yaml --plugin-dir=plugins --no-plugins --only look-ahead --only extents"
        in text.replace("\n", " ")
    )
    assert text.splitlines()[-1].startswith("0 ok, 2 failed, 1 not run: ")


def test_a_kind_is_checked_in_every_layout(run: Run, ahead: str) -> None:
    report = json.loads(run("check", "--kind", "ahead", "--only", "look-ahead", "--json", ahead, status=1))
    assert {model["ok"] for model in report} == {True, False}
    assert {model["outcomes"][0]["status"] for model in report} == {"failed", "does not apply"}


def test_a_kind_without_a_formula_is_named_in_the_last_line(run: Run, specs: Path, ahead: str) -> None:
    (specs / "plugins" / "bent.py").write_text(BENT)
    only = "--only", "meaning", "--set", "graph.decoder.ffn={kind: glu, d_ff: 48, activation: bent}"
    text = " ".join(run("check", "ahead.yaml", *only, ahead).split())
    assert text.endswith(
        "the arithmetic was compared with nothing: the reference has no attention `ahead`, no activation `bent`; "
        "a plugin adds a formula by its hook `tfkit_reference`, a test by `reference=`"
    )
    hook = "\n\n@tfkit.hookimpl\ndef tfkit_reference():\n    return {'attention': 'ahead'}\n"
    (specs / "bad").mkdir()
    (specs / "bad" / "ahead.py").write_text(BROKEN + hook)
    text = " ".join(run("check", "ahead.yaml", "--only", "meaning", "--plugin-dir=bad", status=1).split())
    assert "returned dict, not functions by slot and kind" in text


def test_a_weight_map_without_a_comparison_is_named_in_the_last_line(
    run: Run, specs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_properties, "PROPERTIES", (numbers.inputs_unchanged, forms.in_transformers))
    last = run("check", "gpt2").splitlines()[-1]
    assert last == "the weight map was compared with nothing: --level full measures `transformers`"
    assert run("check", "tiny.yaml").splitlines()[-1].startswith("1 ok; 2 more with --level full")
    assert run("check", "gpt2", "--only", "unchanged-inputs").splitlines()[-1].startswith("1 ok: ")


def test_several_models_are_named(run: Run, ahead: str) -> None:
    text = " ".join(run("check", "--kind", "ahead", "--only", "look-ahead", ahead, status=1).split())
    assert "look-ahead, in attention kind `ahead` in a decoder" in text
    assert "9 more models: stack.layers.0.attention: the model looks ahead: outputs before position 1 change" in text


def test_the_worst_outcome_of_several_models_has_the_largest_deviation() -> None:
    results = [("ok", 2e-7), ("failed", 3.0), ("failed", 7.0), ("failed", 5.0), ("ok", 9e-7), ("does not apply", None)]
    models = [
        Checked("m", "", "quick", 0, (Outcome("a", "is", status, worst), Outcome("b", "is", "ok", number / 1024)))  # type: ignore[arg-type]
        for number, (status, worst) in zip((2, 3, 9, 4, 7, 5), results, strict=True)
    ]
    assert [(worst.name, worst.status, worst.worst) for worst in worst_of(models)] == [
        ("a", "failed", 7.0),
        ("b", "ok", 9 / 1024),
    ]
    assert worst_of([models[0], models[5], models[4]])[0].worst == 9e-7


def test_a_deviation_without_a_size_is_null(run: Run, specs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(subject: ModelUnderTest) -> Iterator[Deviation]:
        yield Deviation.fault("it has none")

    monkeypatch.setattr(all_properties, "PROPERTIES", (property_of("fails", "does not")(fails),))
    (model,) = json.loads(run("check", "tiny.yaml", "--json", status=1), parse_constant=pytest.fail)
    assert (model["outcomes"][0]["status"], model["outcomes"][0]["worst"]) == ("failed", None)


def test_what_does_not_apply_has_a_reason(run: Run, specs: Path) -> None:
    assert "does not apply: " in run("check", "pair.yaml", "--only", "fully-masked", "--only", "ties")


@pytest.mark.parametrize(
    ("kind", "plugin", "only"),
    some(
        [
            (None, "tfkit-additive", "forward"),
            (None, "tfkit-mla", "forward"),
            (None, "tfkit-moe", "forward"),
            (None, "tfkit-recurrent", "forward"),
            ("longrope", None, "meaning"),
        ],
        2,
    ),
)
def test_components_are_checked_without_fields(kind: str | None, plugin: str | None, only: str) -> None:
    """Required numbers have small values; longrope also needs lists."""
    work = Work(tfkit.load_plugins(), only=[only])
    assert all(work.check(model).ok for model in work.of_components(kind, plugin))


def test_a_kind_without_a_small_model_is_left_out(run: Run, specs: Path) -> None:
    text = run("check", "--kind", "linear", "--only", "forward", stderr=True)
    assert "warning: block `linear` cannot be checked alone" in text


@pytest.mark.parametrize(
    ("status", "arguments", "message"),
    [
        (2, "", "a SPEC, `--kind NAME` or `--plugin NAME` is missing"),
        (2, "tiny.yaml --kind gelu", "a SPEC, `--kind NAME` or `--plugin NAME` is missing"),
        (2, "--kind gelu --full-size", "--full-size and --weights have no effect without a SPEC"),
        (
            1,
            "tiny.yaml --only paddign",
            "there is no property `paddign`\n   = help: a property with a similar name exists: `padding`",
        ),
        (1, "--kind gleu", "there is no kind `gleu`\n   = help: a kind with a similar name exists: `glu`"),
        (
            1,
            "--kind encoder",
            "block `encoder` cannot be checked alone\n   = help: check a spec that has it: "
            "`tfkit check albert_base --no-plugins`",
        ),
        (1, "--kind latents", "check a spec that has it; `tfkit components block --no-plugins` shows its fields"),
        (
            1,
            "--kind characters",
            "it is part of a run, not of a model; `tfkit components tokenizer --no-plugins` shows its\n     fields",
        ),
        (
            1,
            "tiny.yaml --only schedule",
            "`schedule` is a property of a run\n   = help: check a run: `tfkit check RUN --no-plugins`",
        ),
        (1, "--plugin nothing", "there is no plugin `nothing`"),
    ],
)
def test_arguments_that_are_rejected(run: Run, specs: Path, status: int, arguments: str, message: str) -> None:
    assert message in run("check", *arguments.split(), status=status, stderr=True)


def test_trained_weights_are_not_held_to_an_initialization(run: Run, specs: Path) -> None:
    run("build", "tiny.yaml", "-o", "out")
    text = run("check", "out", "--only", "init", "--only", "padding")
    assert text.splitlines()[0] == "tiny"
    assert "does not apply: the weights are trained" in text


@pytest.mark.slow
def test_every_kind_of_a_model_is_checked_alone() -> None:
    """Others need later layers, or a sequence of a fixed length."""
    work, refused = Work(tfkit.load_plugins()), set()
    for slot in SLOTS:
        for kind in work.plugins.registry.kinds(slot):
            try:
                assert work.of_components(f"{slot}.{kind}", None)
            except tfkit.SpecError:
                refused.add(kind)
    assert refused == {"value_residual", "grid_bias", "grid_rope"}

"""Kinds that TorchScript does not support: everything else works, and errors of scripting name the component."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.testing import check_cached_step, check_capture, check_component, check_script, example_inputs
from tfkit.tools.check.check import outcomes_of
from tfkit.tools.check.components import models_of, with_component
from tfkit.tools.check.measure import Outcome
from tfkit.tools.check.properties.all import properties_of
from tfkit.tools.export.export import export

FORMS = "export to a format without TorchScript: --format pt2, aoti, onnx or safetensors"


class Lifted(nn.Module):
    """A generator expression and a `*`: TorchScript compiles neither."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        pair = [torch.tanh(x), self.weight]
        return sum(torch.mul(*pair) * factor for factor in (0.25, 1.5))  # type: ignore[return-value]


class LiftedConfig(tfkit.FFNConfig):
    """An FFN whose forward TorchScript does not compile."""

    kind: Literal["lifted"] = "lifted"

    def build(self, make: tfkit.Make) -> nn.Module:
        return Lifted(self.d_model)


class Perhaps(nn.Module):
    """Scripts alone, but stops the FFN that calls it, which needs a tensor."""

    def forward(self, x: Tensor) -> Tensor | None:
        return torch.tanh(x)


class PerhapsConfig(tfkit.ActivationConfig):
    """An activation with an imprecise annotation."""

    kind: Literal["perhaps"] = "perhaps"

    def build(self, make: tfkit.Make) -> nn.Module:
        return Perhaps()


PLUGINS = tfkit.load_plugins(entry_points=False)
SPEC: dict[str, Any] = {
    "tfkit": 1,
    "name": "lifting",
    "d_model": 16,
    "vocab_size": 11,
    "graph": {
        "embedding": {"block": "embedding"},
        "decoder": {
            "block": "decoder",
            "n_layers": 2,
            "attention": {"kind": "mha", "n_heads": 2},
            "ffn": {"kind": "lifted"},
        },
        "logits": {"block": "lm_head"},
    },
}
PATH = "decoder.layers.0.ffn"


def graph() -> tfkit.Graph:
    return tfkit.load(SPEC, plugins=with_component(PLUGINS, LiftedConfig))


def measured(config: type[Any], name: str) -> Outcome:
    """The outcome of a property in a decoder around a component, as `tfkit check` reports it."""
    plugins = with_component(PLUGINS, config)
    (subject,) = models_of(config, plugins, options={}, fields=None, within=["decoder"]).values()
    (outcome,) = outcomes_of(subject, properties_of(plugins).chosen([name]))
    return outcome


def test_check_says_that_it_does_not_apply_and_why() -> None:
    outcome = measured(LiftedConfig, "script")
    assert (outcome.status, outcome.worst) == ("does not apply", None)
    assert "\n" not in outcome.detail
    expected = r"stack\.layers\.0\.ffn: ffn kind `lifted` cannot be scripted by TorchScript: .*" + re.escape(__file__)
    assert re.match(expected + r":\d+\)\Z", outcome.detail)


def test_a_built_in_component_that_a_plugin_stops_is_named() -> None:
    assert torch.jit.script(Perhaps()) is not None
    outcome = measured(PerhapsConfig, "script")
    assert outcome.status == "does not apply"
    assert outcome.detail.startswith("stack.layers.0.ffn: ffn kind `mlp` cannot be scripted by TorchScript: ")


def test_built_in_kinds_have_to_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiftedConfig, "__module__", "tfkit.components.ffn")
    outcome = measured(LiftedConfig, "script")
    assert (outcome.status, outcome.component) == ("failed", "stack.layers.0.ffn")


@pytest.mark.slow
def test_the_compiled_step_is_measured_without_the_scripted_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(LiftedConfig, "cached-step").detail.startswith("stack.layers.0.ffn: ffn kind `lifted` cannot be")
    monkeypatch.setattr(Lifted, "forward", lambda self, x: x * self.weight * float(x.sum()))
    assert measured(LiftedConfig, "cached-step").status == "failed"


def test_a_test_of_the_kind_fails_unless_it_expects_that() -> None:
    def check(only: str, **xfail: str) -> None:
        check_component(LiftedConfig, within=["decoder"], only=[only], xfail=xfail)

    with pytest.raises(AssertionError, match=r"- script, in a decoder: stack\.layers\.0\.ffn: ffn kind `lifted` ca"):
        check("script")
    check("script", script="it uses a generator")
    with pytest.raises(AssertionError, match=r"- forward, in a decoder: it holds, but `xfail` expects .*: it is slow"):
        check("forward", script="it uses a generator", forward="it is slow")
    with pytest.raises(ValueError, match="there is no property `scirpt`"):
        check("script", scirpt="a misspelt name")


def test_checks_of_a_model_that_ask_for_scripting_fail() -> None:
    model = tfkit.build(graph())
    with pytest.raises(AssertionError, match=rf"{PATH}: ffn kind `lifted` cannot be scripted"):
        check_script(model, example_inputs(graph()))


@pytest.mark.slow
def test_a_check_of_the_scripted_step_fails() -> None:
    with pytest.raises(AssertionError, match=rf"{PATH}: ffn kind `lifted` cannot be scripted"):
        check_cached_step(tfkit.build(graph()), example_inputs(graph(), batch=3, length=12))


@pytest.mark.slow
def test_it_is_compiled() -> None:
    check_capture(tfkit.build(graph()), *[example_inputs(graph(), length=length) for length in (5, 8)])


def test_it_trains_and_is_stored(tmp_path: Path) -> None:
    model = tfkit.build(graph())
    tfkit.Loss(model)(torch.randint(11, (2, 7))).backward()
    assert model.decoder.layers[1].ffn.weight.grad.abs().sum() > 0
    export(model, tmp_path / "model.safetensors")
    tfkit.save(model, tmp_path / "folder")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_it_is_exported_to_other_formats(suffix: str, tmp_path: Path) -> None:
    export(tfkit.build(graph()).eval(), tmp_path / f"model.{suffix}")


def test_it_is_not_exported_as_torchscript(tmp_path: Path) -> None:
    with pytest.raises(tfkit.SpecError) as raised:
        export(tfkit.build(graph()), tmp_path / "model.ts")
    (error,) = raised.value.diagnostics
    assert (error.message, error.help) == ("ffn kind `lifted` cannot be scripted by TorchScript", FORMS)
    assert f"graph.{PATH}" in str(raised.value)
    assert not list(tmp_path.iterdir())

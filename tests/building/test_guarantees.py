"""Guarantees that are checked at build time: shapes that would broadcast, changed dtypes, and modified inputs."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tests.plugin.test_faults import plugins
from tests.small_specs import SHIPPED, reduced
from tfkit.building.builder import evaluation_mode
from tfkit.building.guarantees import Watch
from tfkit.component import (
    ActivationConfig,
    AttentionConfig,
    BlockConfig,
    Component,
    FFNConfig,
    InputPositionConfig,
    Make,
    MaskedWire,
    NormConfig,
    RopeScalingConfig,
    ScoreBiasConfig,
    Signal,
    Signals,
    Wire,
)
from tfkit.components.rope import RopeConfig
from tfkit.nn import Context
from tfkit.testing import call, example_inputs
from tfkit.tools.build.first_run import first_run

TEXT = """\
tfkit: 1
name: m
d_model: 8
vocab_size: 11
max_len: 16
graph:
  embedding: {block: embedding, position: POSITION}
  middle: {block: MIDDLE}
  body: {block: encoder, n_layers: 2, attention: ATTENTION, ffn: FFN, norm: NORM}
  sum: {block: add, inputs: [body, middle]}
  logits: {block: HEAD}
"""
RIGHT = {
    "POSITION": "learned",
    "MIDDLE": "norm",
    "ATTENTION": "{kind: mha, n_heads: 2}",
    "FFN": "{kind: relu, d_ff: 4}",
    "NORM": "layernorm",
    "HEAD": "lm_head",
}


def spec(**parts: str) -> str:
    text = TEXT
    for name, part in {**RIGHT, **parts}.items():
        text = text.replace(name, part)
    return text


class First(nn.Module):
    """The first `size` channels; all of them, of the first position alone, where it is 0."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        return x[..., : self.size] if self.size else x[:, :1]


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


class Relu(nn.Module):
    """As the activation of that name with `inplace`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


class WrongFFN(FFNConfig):
    kind: Literal["wrong"] = "wrong"
    module: Literal["first", "double", "inplace", "list"] = "first"

    def build(self, make: Make) -> nn.Module:
        if self.module == "list":
            return nn.LSTM(8, 8, batch_first=True)
        return {"first": First(1), "double": Double(), "inplace": Relu()}[self.module]


class WrongNorm(NormConfig):
    kind: Literal["wrong"] = "wrong"

    def build(self, make: Make, width: int) -> nn.Module:
        return First(1)


class WrongActivation(ActivationConfig):
    kind: Literal["wrong"] = "wrong"

    def build(self, make: Make) -> nn.Module:
        return First(1)


class WrongAttention(AttentionConfig):
    kind: Literal["wrong"] = "wrong"

    def build(self, make: Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        return First(0)


class WrongPosition(InputPositionConfig):
    kind: Literal["wrong"] = "wrong"

    def build(self, make: Make, width: int) -> nn.Module:
        class Positions(nn.Module):
            def forward(self, positions: Tensor) -> Tensor:
                return positions.float()[..., None]

        return Positions()


class WrongBias(ScoreBiasConfig):
    kind: Literal["wrong_bias"] = "wrong_bias"

    def build(self, make: Make, attention: AttentionConfig, causal: bool) -> nn.Module:
        class Bias(nn.Module):
            def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
                return (keys[:, None, None, :] - queries[:, None, :, None]).float()

        return Bias()


class WrongRotation(RopeConfig):
    kind: Literal["wrong_rope"] = "wrong_rope"  # type: ignore[assignment]

    def build_rotation(self, attention: AttentionConfig) -> nn.Module:
        class Rotation(nn.Module):
            def forward(self, x: Tensor, table: Tensor) -> Tensor:
                return x[..., :1]

        return Rotation()


class WrongScaling(RopeScalingConfig):
    kind: Literal["wrong"] = "wrong"

    def build(self, make: Make, width: int, theta: float) -> nn.Module:
        class Scaling(nn.Module):
            def forward(self, n_keys: int, device: torch.device) -> Tensor:
                return torch.ones(1, device=device)

        return Scaling()


class WrongBlock(BlockConfig):
    """Passes the padding mask on, and one position alone."""

    block: Literal["wrong"] = "wrong"
    input: MaskedWire | None = None

    def output(self, inputs: Signals) -> Signal:
        return inputs["input"]  # type: ignore[no-any-return]

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        class Block(nn.Module):
            def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
                return x.mean(1, keepdim=True)

        return Block()


class Shorter(WrongBlock):
    """Says nothing of its length: what is added to it shows that it has another."""

    block: Literal["shorter"] = "shorter"  # type: ignore[assignment]

    def output(self, inputs: Signals) -> Signal:
        return Signal("sequence", width=8)


class WrongHead(BlockConfig):
    block: Literal["wrong_head"] = "wrong_head"
    input: Wire | None = None

    def output(self, inputs: Signals) -> Signal:
        return Signal("logits", width=11)

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        return First(1)


ROPE = "{kind: mha, n_heads: 2, position: {kind: rope, scaling: wrong}}"
CASES: list[tuple[dict[str, str], type[Component], str, str]] = [
    ({"FFN": "wrong"}, WrongFFN, "ffn kind `wrong` returns [2, 3, 1] instead of [2, 3, 8]", "body.ffn"),
    (
        {"FFN": "{kind: wrong, module: double}"},
        WrongFFN,
        "ffn kind `wrong` returns float64 for float32: it must keep the type of its input",
        "body.ffn",
    ),
    (
        {"FFN": "{kind: wrong, module: inplace}"},
        WrongFFN,
        "ffn kind `wrong` changes its input in place",
        "body.ffn",
    ),
    (
        {"FFN": "{kind: wrong, module: list}"},
        WrongFFN,
        "ffn kind `wrong` must return a tensor; got tuple",
        "body.ffn",
    ),
    ({"NORM": "wrong"}, WrongNorm, "norm kind `wrong` returns [2, 3, 1] instead of [2, 3, 8]", "body.norm"),
    (
        {"FFN": "{kind: glu, d_ff: 4, activation: wrong}"},
        WrongActivation,
        "activation kind `wrong` returns [2, 3, 1] instead of [2, 3, 4]",
        "body.ffn.activation",
    ),
    (
        {"ATTENTION": "{kind: wrong, n_heads: 2}"},
        WrongAttention,
        "attention kind `wrong` returns [2, 1, 8] instead of [2, 3, 8]",
        "body.attention",
    ),
    (
        {"POSITION": "wrong"},
        WrongPosition,
        "position kind `wrong` returns [1, 3, 1] instead of [1, 3, 8]: positions",
        "embedding.position",
    ),
    (
        {"ATTENTION": "{kind: mha, n_heads: 2, position: wrong_bias}"},
        WrongBias,
        "position kind `wrong_bias` returns [1, 1, 3, 3] instead of [1, 2, 3, 3]",
        "body.attention.position",
    ),
    (
        {"ATTENTION": "{kind: mha, n_heads: 2, position: wrong_rope}"},
        WrongRotation,
        "position kind `wrong_rope` returns [2, 2, 3, 1] instead of [2, 2, 3, 4]",
        "body.attention.position",
    ),
    (
        {"ATTENTION": ROPE},
        WrongScaling,
        "rope scaling kind `wrong` returns [1] instead of [2]",
        "body.attention.position.scaling",
    ),
    ({"MIDDLE": "wrong"}, WrongBlock, "block `wrong` returns [2, 1, 8] instead of [2, 3, 8]", "middle"),
    ({"HEAD": "wrong_head"}, WrongHead, "block `wrong_head` returns [2, 3, 1] instead of [2, any, 11]", "logits"),
]


def refusal(text: str, config: type[Component]) -> tfkit.SpecError:
    with pytest.raises(tfkit.SpecError) as caught:
        tfkit.build(tfkit.loads(text, plugins=plugins(config)))
    return caught.value


@pytest.mark.parametrize(("parts", "config", "message", "location"), CASES)
def test_what_would_broadcast_is_refused(
    parts: dict[str, str], config: type[Component], message: str, location: str
) -> None:
    first, *_ = refusal(spec(**parts), config).diagnostics
    assert message in first.message
    assert first.path == f"graph.{location}"
    assert first.span is not None
    assert first.help == f"correct the component instead of the spec: it is written in {__name__}"


def test_a_model_of_short_sequences_is_checked() -> None:
    text = spec(FFN="wrong").replace("max_len: 16", "max_len: 2")
    (diagnostic,) = refusal(text, WrongFFN).diagnostics
    assert "returns [2, 2, 1] instead of [2, 2, 8]" in diagnostic.message


def test_what_is_added_has_one_shape() -> None:
    text = spec(MIDDLE="shorter").replace("body: {", "body: {input: embedding, ")
    (diagnostic,) = refusal(text, Shorter).diagnostics
    assert diagnostic.message == "block `add` takes tensors of one shape, but got [2, 1, 8] and [2, 3, 8]"


def test_a_fault_in_many_layers_is_told_once() -> None:
    assert len(refusal(spec(FFN="wrong"), WrongFFN).diagnostics) == 1


def test_a_wrong_type_is_told_of_its_component_alone() -> None:
    """What is computed from it is of a wrong type too, and not at fault."""
    (diagnostic,) = refusal(spec(FFN="{kind: wrong, module: double}", NORM="rmsnorm"), WrongFFN).diagnostics
    assert diagnostic.message == "ffn kind `wrong` returns float64 for float32: it must keep the type of its input"


def test_the_first_trial_looks_at_built_in_components_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x[..., :1])
    graph = tfkit.loads(spec(), plugins=plugins())
    tfkit.build(graph)
    with pytest.raises(tfkit.SpecError, match=re.escape("returns [2, 16, 1] instead of [2, 16, 8]")):
        first_run(graph)


def test_building_leaves_no_trace() -> None:
    """Neither hooks, nor another mode, nor a random number that is gone."""
    graph = tfkit.loads(spec(FFN="right"), plugins=plugins(Right))
    torch.manual_seed(0)
    model = tfkit.build(graph)
    actual = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(actual, torch.rand(1))
    assert all(module.training and not module._forward_hooks for module in model.modules())


class Right(WrongFFN):
    kind: Literal["right"] = "right"  # type: ignore[assignment]

    def build(self, make: Make) -> nn.Module:
        class Random(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * torch.rand(1)

        return Random()


@pytest.mark.parametrize("name", SHIPPED[::4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_built_in_components_keep_their_promises(name: str, dtype: torch.dtype) -> None:
    graph: Any = reduced(name)
    model = tfkit.build(graph, dtype=dtype)
    inputs = {n: x.to(dtype) if x.is_floating_point() else x for n, x in example_inputs(graph, padding="left").items()}
    watch = Watch(model)
    with evaluation_mode(model), torch.no_grad(), watch.watching():
        call(model, inputs)
    assert not watch.broken

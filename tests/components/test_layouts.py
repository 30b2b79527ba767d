"""The placement of norms and the inputs of sublayers: each layout is compared with its formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.nn import Context

HEAD = "tfkit: 1\nname: test\nd_model: 16\n"


def build(text: str, *sets: str) -> Any:
    return tfkit.build(tfkit.loads(HEAD + text, sets=sets)).eval()


def features(width: int, length: int = 6) -> Tensor:
    return torch.randn(3, length, width, generator=torch.Generator().manual_seed(0))


LAYOUT = (
    "inputs: {x: {type: features, width: 16}}\ngraph:\n  encoder: {block: encoder, n_layers: 1, final_norm: false, "
)
LAYOUT += "attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 24}}\n"
Formula = Callable[[Any, Tensor, Callable[[Tensor], Tensor]], Tensor]


def pre(m: Any, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    x = x + attend(m.attention_norm_in(x))
    return x + m.ffn(m.ffn_norm_in(x))


def post(m: Any, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    x = m.attention_norm_after(x + attend(x))
    return m.ffn_norm_after(x + m.ffn(x))


def output(m: Any, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    x = x + m.attention_norm_out(attend(x))
    return x + m.ffn_norm_out(m.ffn(x))


def sandwich(m: Any, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    x = x + m.attention_norm_out(attend(m.attention_norm_in(x)))
    return x + m.ffn_norm_out(m.ffn(m.ffn_norm_in(x)))


def parallel(m: Any, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    return x + attend(m.input_norm(x)) + m.ffn(m.input_norm(x))


def parallel_two_norms(m: Any, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    return x + attend(m.attention_norm_in(x)) + m.ffn(m.ffn_norm_in(x))


def two_ffns(m: Any, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    x = x + m.ffn(m.ffn_norm_in(x))
    x = x + attend(m.attention_norm_in(x))
    return x + m.ffn_2(m.ffn_2_norm_in(x))


def macaron(m: Any, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    x = x + 0.5 * m.ffn(m.ffn_norm_in(x))
    x = x + attend(m.attention_norm_in(x))
    return m.ffn_2_norm_after(x + 0.5 * m.ffn_2(m.ffn_2_norm_in(x)))


def scaled(m: Any, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    x = x + 0.25 * m.attention_residual_scale.weight * attend(m.attention_norm_in(x))
    return x + 0.25 * m.ffn_residual_scale.weight * m.ffn(m.ffn_norm_in(x))


AFTER = "norm_in: false, norm_after: true"
HALF = "{sublayer: ffn, residual: {scale: 0.5}}"
LAST = "{sublayer: ffn, residual: {scale: 0.5}, norm_after: true}"
LAYOUTS: dict[str, tuple[Formula, list[str]]] = {
    "pre": (pre, []),
    "post": (post, ["placement=post"]),
    "output": (output, ["placement=output"]),
    "sandwich": (sandwich, ["placement=sandwich"]),
    "parallel": (parallel, ["placement=parallel"]),
    "parallel_two_norms": (parallel_two_norms, ["placement=parallel_two_norms"]),
    "post, spelt out": (post, [f"sublayers=[{{sublayer: attention, {AFTER}}}, {{sublayer: ffn, {AFTER}}}]"]),
    "two FFNs": (two_ffns, ["sublayers=[ffn, attention, ffn]"]),
    "macaron": (macaron, [f"sublayers=[{HALF}, attention, {LAST}]"]),
    "learned scale": (scaled, ["residual={scale: 0.25, learned: scalar}"]),
    "learned scales": (scaled, ["residual={scale: 0.25, learned: vector}"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_is_its_formula(layout: str) -> None:
    formula, sets = LAYOUTS[layout]
    model, x = build(LAYOUT, *(f"graph.encoder.{value}" for value in sets)), features(16)
    scramble(model)
    layer = model.encoder.layers[0]
    expected = formula(layer, x, lambda y: layer.attention(y, Context(None, None, None)))
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    used = {name.partition(".")[0] for name, _ in layer.named_parameters()}
    assert all(name in formula.__code__.co_names or name == "attention" for name in used), used


def scramble(model: nn.Module) -> None:
    """Norms and scales that start as the identity would hide that they stand in the wrong place."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)


def test_the_final_norm_is_there_unless_the_layers_end_in_norms() -> None:
    for placement, there in (("pre", True), ("post", False), ("sandwich", True), ("parallel", True)):
        text = LAYOUT.replace("final_norm: false, ", f"placement: {placement}, ")
        assert (build(text).encoder.final_norm is not None) == there
    sets = ["graph.encoder.placement=post", "graph.encoder.final_norm=rmsnorm"]
    model, x = build(LAYOUT, *sets), features(16)
    torch.testing.assert_close(model(x).square().mean(-1), torch.ones(3, 6), atol=1e-4, rtol=0)

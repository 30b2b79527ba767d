"""Attention weights of any model, by name, compared with a loop; tests/parity compares them with other libraries."""

from __future__ import annotations

import copy
import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.components.attention import MultiHeadConfig
from tfkit.nn import Softmax

SPEC = """
    tfkit: 1
    name: small
    d_model: 16
    vocab_size: 11
    dropout: 0.5
    graph:
      embedding: embedding
      decoder: {block: decoder, n_layers: 2, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 24}}
      logits: lm_head
"""
TOKENS = torch.arange(12).view(2, 6) % 11


def built(*sets: str, **options: Any) -> torch.fx.GraphModule:
    return tfkit.build(tfkit.loads(SPEC, sets=sets), **options)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "flex"])
def test_a_model_of_any_backend_is_left_as_it_is(backend: Any) -> None:
    model = built(attention_backend=backend).train()
    before = copy.deepcopy(model.state_dict())
    actual = tfkit.attention_weights(model, TOKENS)
    assert list(actual) == ["decoder.layers.0.attention", "decoder.layers.1.attention"]
    for weights in actual.values():
        assert weights.shape == (2, 2, 6, 6)
        assert not weights.requires_grad
        assert not weights.triu(1).any()
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 2, 6))
    assert model.training
    assert str(model) == str(built(attention_backend=backend))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(tfkit.attention_weights(model, TOKENS), actual, rtol=0, atol=0)


def test_the_weights_are_those_of_the_formula() -> None:
    """Scores of the first layer, whose input is the normalized embedding, by plain matrices."""
    model = built("decoder.attention.softcap=2", "decoder.attention.mask={left: 2, right: 0}").eval()
    layer = model.decoder.layers[0]
    x = layer.attention_norm_in(model.embedding(TOKENS))
    q, k, _ = layer.attention.project.qkv(x).view(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
    scores = 2 * torch.tanh(q @ k.mT / math.sqrt(8) / 2)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    want = scores.masked_fill((distance < 0) | (distance > 2), -math.inf).softmax(dim=-1)
    torch.testing.assert_close(tfkit.attention_weights(model, TOKENS)["decoder.layers.0.attention"], want)


def test_queries_without_a_key_have_weights_of_zero() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    weights = tfkit.attention_weights(built(), TOKENS, tokens_mask=mask)["decoder.layers.0.attention"]
    assert not weights[1, :, :2].any()
    torch.testing.assert_close(weights.sum(dim=-1)[mask[:, None].expand(2, 2, 6)], torch.ones(20))


def test_layers_that_share_weights_have_an_entry_for_each_run() -> None:
    model = built("decoder.n_layers=4", "decoder.layers={groups: 2}")
    actual = tfkit.attention_weights(model, TOKENS)
    assert list(actual) == [f"decoder.layers.{group}.attention[{run}]" for group in (0, 1) for run in (0, 1)]
    assert not torch.equal(actual["decoder.layers.0.attention[0]"], actual["decoder.layers.0.attention[1]"])


def test_two_attentions_of_a_layer_have_a_name_each() -> None:
    model = built("decoder.n_layers=1", "decoder.sublayers=[attention, attention, ffn]")
    assert list(tfkit.attention_weights(model, TOKENS)) == [
        "decoder.layers.0.attention",
        "decoder.layers.0.attention_2",
    ]


class Twice(nn.Module):
    """The difference of two attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Softmax()
        self.second = Softmax()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.transpose(2, 3)
        return (self.first(scores, mask) - self.second(-scores, mask)) @ v


class Bare(nn.Module):
    """A softmax that nobody sees."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return torch.softmax(q @ k.transpose(2, 3), dim=-1) @ v


class TwiceConfig(MultiHeadConfig):
    """Two softmaxes."""

    kind: Literal["twice"] = "twice"  # type: ignore[assignment]

    def build_core(self, make: tfkit.Make, *, causal: bool) -> nn.Module:
        return Twice()


class BareConfig(MultiHeadConfig):
    """None that is known."""

    kind: Literal["bare"] = "bare"  # type: ignore[assignment]

    def build_core(self, make: tfkit.Make, *, causal: bool) -> nn.Module:
        return Bare()


def with_kinds(*sets: str) -> torch.fx.GraphModule:
    plugins = tfkit.load_plugins(entry_points=False)
    for config in (TwiceConfig, BareConfig):
        plugins.registry.add(config, "under test")
    return tfkit.build(tfkit.loads(SPEC, sets=sets, plugins=plugins))


def test_an_attention_with_two_softmaxes_has_an_entry_for_each() -> None:
    actual = tfkit.attention_weights(with_kinds("decoder.n_layers=1", "decoder.attention.kind=twice"), TOKENS)
    first, second = actual.items()
    assert first[0] == "decoder.layers.0.attention.core.first"
    assert second[0] == "decoder.layers.0.attention.core.second"
    assert not torch.equal(first[1], second[1])


def test_what_shows_no_weights_is_left_out() -> None:
    mixed = with_kinds("decoder.layers={variants: {odd: {attention: {kind: bare, n_heads: 2}}}, pattern: [odd, base]}")
    assert list(tfkit.attention_weights(mixed, TOKENS)) == ["decoder.layers.1.attention"]
    with pytest.raises(ValueError, match="`small` has no attention that exposes its weights"):
        tfkit.attention_weights(with_kinds("decoder.attention.kind=bare"), TOKENS)


def test_a_model_that_is_not_ours_or_was_changed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"was not built by `tfkit\.build`"):
        tfkit.attention_weights(nn.Linear(2, 2), TOKENS)
    model = built()
    model.decoder.layers[0].ffn = nn.Identity()
    with pytest.raises(ValueError, match="`small` must have the parameters that it was built with"):
        tfkit.attention_weights(model, TOKENS)


def test_in_half_precision_and_with_trained_weights() -> None:
    model = built(dtype=torch.bfloat16)
    (before, *_) = tfkit.attention_weights(model, TOKENS).values()
    assert before.dtype == torch.bfloat16
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    (after, *_) = tfkit.attention_weights(model, TOKENS).values()
    assert not torch.equal(before, after)

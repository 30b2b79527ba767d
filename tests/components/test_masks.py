"""The shared context, compared with a loop over queries and keys, and each dropout alone."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.component import MaskConfig
from tfkit.components.context import AttentionContext, ContextKey, additive

LENGTH = 7
PADDINGS = {
    "none": None,
    "right": [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0]],
    "left": [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]],
    "a row without tokens": [[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1]],
}
PREFIXES = {"no prefix": None, "prefix": [0, 3, 2]}


def naive(mask: MaskConfig, padding: Tensor | None, prefix: Tensor | None) -> Tensor:
    """[3, q, k]: one rule after the other for each query and key."""
    visible = torch.zeros(3, LENGTH, LENGTH, dtype=torch.bool)
    for b, q, k in product(range(3), range(LENGTH), range(LENGTH)):
        near = mask.left is None or q - k <= mask.left
        past = mask.right is None or k - q <= mask.right
        tokens_before = k if padding is None else int(padding[b, :k].sum())
        in_prefix = prefix is not None and tokens_before < prefix[b]
        is_token = padding is None or bool(padding[b, k])
        visible[b, q, k] = is_token and ((near and past) or in_prefix)
    return visible


def context(mask: MaskConfig, *, flag: bool = False) -> AttentionContext:
    return AttentionContext(ContextKey(mask, prefix=False, flag=flag), rotary=None, position=None, slopes=None)


@pytest.mark.parametrize("padded", PADDINGS)
@pytest.mark.parametrize("prefixed", PREFIXES)
def test_the_mask_is_that_of_a_loop(padded: str, prefixed: str) -> None:
    options, lengths = PADDINGS[padded], PREFIXES[prefixed]
    padding = None if options is None else torch.tensor(options, dtype=torch.bool)
    prefix = None if lengths is None else torch.tensor(lengths)
    for left, right in product([None, 0, 2, 10], [None, 0, 1, 10]):
        mask = MaskConfig(left=left, right=right)
        actual = context(mask)(torch.zeros(3, LENGTH, 4), padding, prefix).mask
        if actual is None:
            assert (left, right, padding) == (None, None, None)
            continue
        visible = (actual == 0).expand(3, 1, LENGTH, LENGTH)
        assert torch.equal(visible[:, 0], naive(mask, padding, prefix)), mask
        assert torch.equal(actual == -math.inf, actual != 0), mask


def test_the_causal_flag_leaves_the_mask_out_until_there_is_padding() -> None:
    causal, x = context(MaskConfig(right=0), flag=True), torch.zeros(3, LENGTH, 4)
    assert causal(x, None, None).mask is None
    padding = torch.tensor(PADDINGS["left"], dtype=torch.bool)
    mask = causal(x, padding, None).mask
    assert torch.equal(mask == 0, naive(MaskConfig(right=0), padding, None)[:, None])


@pytest.mark.parametrize(("left", "prefix", "all"), [(None, False, True), (2, False, True), (2, True, False)])
def test_a_last_query_attends_to_all_cached_keys_unless_a_prefix_hides_its_window(
    left: int | None, prefix: bool, all: bool
) -> None:
    assert ContextKey(MaskConfig(left=left, right=0), prefix=prefix, flag=False).reads_all is all


def test_a_prefix_with_a_pairwise_mask() -> None:
    pairs = torch.ones(3, LENGTH, LENGTH, dtype=torch.bool)
    pairs[:, :, 1] = False
    prefix = torch.tensor(PREFIXES["prefix"])
    mask = context(MaskConfig(right=0))(torch.zeros(3, LENGTH, 4), pairs, prefix).mask
    assert mask is not None
    assert torch.equal(mask[:, 0] == 0, naive(MaskConfig(right=0), None, prefix) & pairs)


@pytest.mark.parametrize("part", ["rotary", "position", "relative", "left", None])
def test_padding_between_tokens_is_refused_where_distances_matter(part: str | None) -> None:
    key = ContextKey(MaskConfig(left=2 if part == "left" else None), prefix=False, flag=False)
    modules = {name: nn.Identity() if name == part else None for name in ("rotary", "position", "relative")}
    module, padding = AttentionContext(key, **modules, slopes=None), torch.tensor([[True, False, True]])
    with pytest.raises(ValueError, match="padding must not be between tokens") if part else nullcontext():
        module(torch.zeros(1, 3, 4), padding, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_additive_mask_has_the_type_of_what_it_masks(dtype: torch.dtype) -> None:
    mask = additive(torch.tensor([[True, False]]), torch.zeros(1, dtype=dtype))
    assert mask.dtype == dtype
    assert mask.tolist() == [[0.0, -math.inf]]


def test_padding_may_be_given_as_numbers() -> None:
    x, padding = torch.zeros(3, LENGTH, 4), torch.tensor(PADDINGS["right"])
    both = [context(MaskConfig(right=0))(x, mask, None).mask for mask in (padding, padding.bool())]
    assert torch.equal(*both)


# ---- dropout in its four places, each alone ----

SPEC = """
    tfkit: 1
    name: dropouts
    d_model: 32
    vocab_size: 11
    inputs: {tokens: tokens}
    graph:
      embedding: {block: embedding, dropout: %(embedding)s}
      encoder:
        block: encoder
        n_layers: 1
        norm: rmsnorm
        dropout: %(residual)s
        attention: {kind: mha, n_heads: 2, dropout: %(attention)s}
        ffn: {kind: relu, d_ff: 48, dropout: %(ffn)s}
    outputs: [encoder]
"""
DROPOUTS = ("embedding", "residual", "attention", "ffn")
P = 0.4


def model_with(position: str) -> nn.Module:
    rates = {name: P if name == position else 0.0 for name in DROPOUTS}
    return tfkit.build(tfkit.loads(SPEC % rates))


@pytest.mark.parametrize("position", DROPOUTS)
def test_each_dropout_is_alone_and_only_in_train_mode(position: str) -> None:
    model, tokens = model_with(position), torch.arange(10)[None]
    rates = {name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    names = {
        "embedding": {"embedding.dropout"},
        "residual": {"encoder.layers.0.attention_dropout", "encoder.layers.0.ffn_dropout"},
        "ffn": {"encoder.layers.0.ffn.dropout"},
        "attention": set(),
    }
    assert rates == dict.fromkeys(names[position], P)
    model.train()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("position", ["embedding", "residual", "ffn"])
def test_a_share_of_the_values_is_zero_and_the_rest_is_scaled_up(position: str) -> None:
    model, records = model_with(position).train(), []
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _, args, output: records.append((args[0], output)))
    model(torch.randint(11, (40, 16)))
    for before, after in records:
        remaining = after != 0
        nonzero = before != 0
        assert abs(1 - remaining[nonzero].float().mean() - P) < 0.02
        torch.testing.assert_close(after[remaining], before[remaining] / (1 - P))


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_dropout_of_attention_weights(softcap: float | None) -> None:
    """One head that reads equal keys evenly: what comes out counts the weights that were left."""
    text = f"""
        tfkit: 1
        name: weights
        d_model: 8
        inputs: {{x: {{type: features, width: 8}}}}
        graph:
          encoder:
            block: encoder
            n_layers: 1
            final_norm: false
            sublayers: [{{sublayer: attention, norm_in: false}}]
            attention: {{kind: mha, n_heads: 1, bias: false, dropout: {P}, softcap: {softcap or "null"}}}
    """
    model, length = tfkit.build(tfkit.loads(text)), 50
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.eye(8).repeat(3, 1) if "qkv" in name else torch.eye(8))
    x = torch.ones(60, length, 8)
    torch.manual_seed(0)
    shares = (model.train()(x) - x)[..., 0] * (1 - P)
    counts = shares * length
    torch.testing.assert_close(counts, counts.round(), atol=1e-3, rtol=0)
    assert abs(shares.mean() - (1 - P)) < 0.01
    assert abs(counts.var() / (length * P * (1 - P)) - 1) < 0.15
    torch.testing.assert_close(model.eval()(x) - x, torch.ones_like(x))

"""Each core of attention, compared with a loop, and the choice of the core."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.component import AttentionBackend, MaskConfig
from tfkit.components.attention_core import Eager, ScaledDotProduct, SinkDotProduct, SinkSoftmax
from tfkit.components.context import AttentionContext, ContextKey
from tfkit.components.flex import FlexAttention, flex_mask, readable

from .attentions import BACKENDS, cores, spec

SIZES = {"b": 3, "h": 4, "g": 2, "t": 6, "d": 16}
SCALE = 0.3
"""Not the default."""


@torch.no_grad()
def naive(q: Tensor, k: Tensor, v: Tensor, readable: Tensor, *, cap: float | None, slopes: list[float]) -> Tensor:
    """Query by query in plain numbers; `readable` [b, q, k]."""
    out = torch.zeros_like(q)
    group = q.size(1) // k.size(1)
    for b, h, i in product(*map(range, q.shape[:3])):
        keys = [j for j in range(k.size(2)) if readable[b, i, j]]
        scores = [float(q[b, h, i] @ k[b, h // group, j]) * SCALE for j in keys]
        if cap is not None:
            scores = [cap * math.tanh(score / cap) for score in scores]
        powers = [math.exp(score - slopes[h] * abs(i - j)) for score, j in zip(scores, keys, strict=True)]
        for power, j in zip(powers, keys, strict=True):
            out[b, h, i] += power / sum(powers) * v[b, h // group, j]
    return out


def tensors() -> list[Tensor]:
    """Queries, keys and values."""
    b, h, g, t, d = SIZES.values()
    generator = torch.Generator().manual_seed(0)
    return [(2 * torch.randn(b, n, t, d, generator=generator)).requires_grad_() for n in (h, g, g)]


def core_of(name: str, cap: float | None) -> nn.Module:
    grouped = SIZES["h"] != SIZES["g"]
    eager = Eager(scale=SCALE, dropout=0.0, heads=(SIZES["h"], SIZES["g"]), cap=cap)
    dense = ScaledDotProduct(scale=SCALE, dropout=0.0, causal=False, grouped=grouped) if cap is None else eager
    flex = FlexAttention(scale=SCALE, cap=cap, grouped=grouped, dense=dense)
    return {"sdpa": dense, "eager": eager, "flex": flex}[name]


@pytest.mark.usefixtures("flex")
@pytest.mark.parametrize("sloped", [False, True], ids=["flat", "sloped"])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_core_is_the_formula_and_gives_zeros_where_nothing_is_read(
    name: str, cap: float | None, sloped: bool
) -> None:
    q, k, v = tensors()
    t, slopes = SIZES["t"], [0.5, 0.25, 0.125, 1.0] if sloped else [0.0] * 4
    padding = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    distance = torch.arange(t)[:, None] - torch.arange(t)
    readable = ((distance >= 0) & (distance <= 2))[None] & padding[:, None]
    mask: Any = torch.zeros(3, 1, t, t).masked_fill(~readable[:, None], -math.inf)
    mask = mask - torch.tensor(slopes)[:, None, None] * distance.abs() if sloped else mask
    if name == "flex":
        mask = flex_mask(torch.zeros(3, t, 64), padding, None, left=2, right=0, slopes=slopes if sloped else None)
        assert mask.blocks.shape == (3, 1, t, t)
    actual = core_of(name, cap)(q, k, v, mask)
    torch.testing.assert_close(actual, naive(q, k, v, readable, cap=cap, slopes=slopes), rtol=1e-5, atol=1e-5)
    assert not actual[2].any()
    assert not actual[1, :, :2].any()
    actual.square().sum().backward()
    for gradient in (q.grad, k.grad, v.grad):
        assert gradient is not None
        assert gradient.isfinite().all()
        assert not gradient[2].any()


@pytest.mark.usefixtures("flex")
@pytest.mark.parametrize("change", ["nothing", "slopes", "cap"])
def test_what_hides_nothing_is_left_to_the_fused_kernel_if_the_scores_stay_as_they_are(change: str) -> None:
    q, k, v = tensors()
    cap = 2.0 if change == "cap" else None
    slopes = [0.5, 0.25, 0.125, 1.0] if change == "slopes" else None
    mask = flex_mask(torch.zeros(3, SIZES["t"], 64), None, None, left=None, right=None, slopes=slopes)
    assert mask.blocks is None
    everything = torch.ones(3, SIZES["t"], SIZES["t"], dtype=torch.bool)
    core, left = core_of("flex", cap), []
    core.dense.register_forward_hook(lambda *_: left.append(True))
    want = naive(q, k, v, everything, cap=cap, slopes=slopes or [0.0] * 4)
    torch.testing.assert_close(core(q, k, v, mask), want, rtol=1e-5, atol=1e-5)
    assert bool(left) == (change == "nothing")


@pytest.mark.usefixtures("flex")
def test_flex_computes_in_the_type_of_the_values() -> None:
    """In mixed precision queries and keys may come from a rotation in float32."""
    q, k, v = tensors()
    mask = flex_mask(torch.zeros(3, SIZES["t"], 64), None, None, left=2, right=0, slopes=None)
    actual = core_of("flex", None)(q, k, v.bfloat16(), mask)
    assert actual.dtype == torch.bfloat16
    want = core_of("flex", None)(q, k, v, mask)
    torch.testing.assert_close(actual.float(), want, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("prefixed", [False, True], ids=["", "prefix"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (100, 0), (40, 130)])
def test_a_block_is_skipped_if_nothing_in_it_is_read(
    left: int | None, right: int, padded: bool, prefixed: bool
) -> None:
    """The kernel never looks into the others: each block of 128 x 128 against all pairs in it."""
    t, x = 300, torch.zeros(3, 300, 4)
    padding = torch.arange(t) >= torch.tensor([[0], [150], [300]]) if padded else None
    prefix = torch.tensor([140, 20, 0]) if prefixed else None
    context = AttentionContext(
        ContextKey(MaskConfig(left=left, right=right), prefixed, flag=False), rotary=None, position=None, slopes=None
    )
    dense = context(x, padding, prefix).mask
    assert dense is not None
    pairs = F.pad(dense == 0, (0, 84, 0, 84)).view(-1, 1, 3, 128, 3, 128).any(dim=-1).any(dim=3)
    blocks = flex_mask(x, padding, prefix, left=left, right=right, slopes=None).blocks
    assert blocks is not None
    assert torch.equal(blocks.to_dense().bool(), pairs)


@pytest.mark.parametrize(("left", "right"), [(None, 0), (2, 0), (3, 2), (None, None)])
def test_the_rule_of_the_kernel_grants_the_pairs_of_the_mask(left: int | None, right: int | None) -> None:
    t, x = 9, torch.zeros(3, 9, 4)
    b, q, k = torch.meshgrid(torch.arange(3), torch.arange(t), torch.arange(t), indexing="ij")
    for padding, prefix in product((None, torch.arange(t) >= torch.tensor([[0], [4], [9]])), (None, [5, 3, 0])):
        lengths = None if prefix is None else torch.tensor(prefix)
        key = ContextKey(MaskConfig(left=left, right=right), prefix is not None, flag=False)
        dense = AttentionContext(key, rotary=None, position=None, slopes=None)(x, padding, lengths).mask
        expected = torch.ones(()) if dense is None else dense[:, 0] == 0
        rule = readable(padding, lengths, left=left, right=right)
        assert torch.equal(rule(b, b, q, k), expected.bool().expand(3, t, t))


@pytest.mark.parametrize(
    ("backend", "attention", "expected"),
    [
        ("sdpa", {}, ScaledDotProduct),
        ("sdpa", {"softcap": 3.0}, Eager),
        ("eager", {}, Eager),
        ("flex", {}, FlexAttention),
        ("flex", {"dropout": 0.1}, ScaledDotProduct),
        ("flex", {"dropout": 0.1, "softcap": 3.0}, Eager),
        ("flex", {"d_head": 8}, ScaledDotProduct),
    ],
)
def test_the_core_is_chosen_when_the_model_is_built(
    backend: AttentionBackend, attention: dict[str, Any], expected: type[nn.Module]
) -> None:
    model = tfkit.build(spec("decoder", attention), attention_backend=backend)
    assert [type(core) for core in cores(model)] == [expected] * 2
    assert model.state_dict().keys() == tfkit.build(spec("decoder", {})).state_dict().keys()


@pytest.mark.parametrize("name", ["sdpa", "eager", "sinks"])
@torch.no_grad()
def test_weights_drop_out_in_training_and_nowhere_else(name: str) -> None:
    softmax = SinkSoftmax(SIZES["h"])
    softmax.reset_parameters()
    heads = SIZES["h"], SIZES["g"]
    built: dict[str, Callable[[float], nn.Module]] = {
        "sdpa": lambda rate: ScaledDotProduct(scale=SCALE, dropout=rate, causal=False, grouped=True),
        "eager": lambda rate: Eager(scale=SCALE, dropout=rate, heads=heads, cap=2.0),
        "sinks": lambda rate: SinkDotProduct(scale=SCALE, dropout=rate, causal=False, heads=heads, softmax=softmax),
    }
    plain, dropping = built[name](0.0), built[name](0.5)
    want = plain(*tensors(), None)
    assert torch.equal(dropping.eval()(*tensors(), None), want)
    assert not torch.allclose(dropping.train()(*tensors(), None), want, atol=1e-3)


def test_a_kind_of_attention_gets_its_mask_unless_it_declares_otherwise() -> None:
    """A kind that ignores the flag would attend to later tokens, and no error would say so."""
    for backend in get_args(AttentionBackend):
        assert not tfkit.AttentionConfig.causal_flag(cast(Any, None), backend)
        assert not tfkit.AttentionConfig.flex_mask(cast(Any, None), backend)

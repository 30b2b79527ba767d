"""FlexAttention: what a mask hides is said as a rule, and blocks of keys that are hidden as a whole are skipped.

https://arxiv.org/abs/2412.05496. It serves on CUDA, where windows, prefixes, padding, soft-caps and ALiBi then need no
[queries, keys] matrix. Everything else is left to another core that computes the same: other devices, plain causal
attention (the fused kernels have a flag for it), sequences in pieces, cross-attention, sinks, other biases, and
TorchScript.

b batch, t positions, q queries, k keys, h query heads, g key-value heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tfkit.nn import is_scripting, named

MIN_WIDTH = 16
"""The kernel's least width of a head."""


class FlexMask(NamedTuple):
    """What stands in `Context.mask` for a mask and a bias that are not written out."""

    blocks: BlockMask | None
    """Which keys a query reads; None hides nothing."""
    slopes: Tensor | None
    """ALiBi's slopes, [h]: what a score loses per position between query and key."""


class FlexAttention(nn.Module):
    """Queries [b, h, q, d], keys and values [b, g, k, d] and a `FlexMask` -> [b, h, q, d].

    Any other mask goes to `dense`, the core that writes its mask out.
    """

    def __init__(self, *, scale: float, cap: float | None, grouped: bool, dense: nn.Module) -> None:
        super().__init__()
        self.scale = scale
        self.cap = cap
        self.grouped = grouped
        self.dense = dense

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        # TorchScript skips this `if`; it would compile a condition that stands beside it.
        if not is_scripting():  # noqa: SIM102
            if isinstance(mask, FlexMask):
                return self.flex(q, k, v, mask)
        return self.dense(q, k, v, mask)

    def flex(self, q: Tensor, k: Tensor, v: Tensor, mask: FlexMask) -> Tensor:
        """The same, given a `FlexMask`."""
        # A tensor, because a compiler that takes numbers for dynamic could not put one into the kernel.
        cap = None if self.cap is None else torch.full((), self.cap, device=q.device)
        bend = bending(cap, mask.slopes)
        if bend is None and mask.blocks is None:
            return self.dense(q, k, v, None)
        attend: Any = compiled(flex_attention) if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
        # In mixed precision a rotation may return float32, and the kernel takes one type.
        q, k = q.to(v.dtype), k.to(v.dtype)
        return attend(q, k, v, bend, mask.blocks, self.scale, self.grouped)

    def extra_repr(self) -> str:
        return named(f"scale={self.scale:.6g}", softcap=self.cap, grouped=self.grouped)


def serves(x: Tensor) -> bool:
    """Whether the kernel runs where x is: elsewhere it is slow, or has no backward."""
    return x.is_cuda


def bending(cap: Tensor | None, slopes: Tensor | None) -> Callable[..., Tensor] | None:
    """What becomes of a score: the soft-cap, then the slopes; None if nothing."""
    if cap is None and slopes is None:
        return None

    def bend(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score - slopes[h] * (q - k).abs()
        return score

    return bend


def flex_mask(
    x: Tensor,
    padding: Tensor | None,
    prefix: Tensor | None,
    *,
    left: int | None,
    right: int | None,
    slopes: Sequence[float] | None,
) -> FlexMask:
    """The mask of the sequence x [b, t, d_model], for all layers that share it.

    Args:
        x: says how long the sequence is, and where.
        padding: True where there is a token, [b, t].
        prefix: how many tokens at the start every query reads, [b].
        left: keys before its own position that a query reads; None is no limit.
        right: keys after it.
        slopes: ALiBi's, by head.
    """
    given = None if slopes is None else torch.tensor(slopes, device=x.device)
    if padding is None and left is None and right is None:
        return FlexMask(None, given)
    create = compiled(create_block_mask) if x.is_cuda and not torch.compiler.is_compiling() else create_block_mask
    batch, t = None if padding is None and prefix is None else x.size(0), x.size(1)
    rule = readable(None if padding is None else padding.to(torch.bool), prefix, left=left, right=right)
    return FlexMask(create(rule, batch, None, t, t, x.device), given)


def readable(
    padding: Tensor | None, prefix: Tensor | None, *, left: int | None, right: int | None
) -> Callable[..., Tensor]:
    """The rule by which a query reads a key; see `flex_mask`."""
    index = None if prefix is None or padding is None else padding.long().cumsum(dim=1) - 1

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = k >= 0
        if right is not None:
            visible = visible & (k - q <= right)
        if left is not None:
            visible = visible & (q - k <= left)
        if prefix is not None:
            visible = visible | ((k if index is None else index[b, k]) < prefix[b])
        return visible if padding is None else visible & padding[b, k]

    return rule


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function: compiled once for all models, when one first needs it."""
    return torch.compile(function)

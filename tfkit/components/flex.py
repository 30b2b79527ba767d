"""FlexAttention: the mask is a function, and blocks of keys that are entirely masked are skipped.

https://arxiv.org/abs/2412.05496. On CUDA, windows, prefixes, padding, soft-caps and ALiBi then need no [queries, keys]
matrix. A different core with equal results computes everything else: other devices, plain causal attention (the fused
kernels have a flag for it), decoding, cross-attention, sinks, other biases, and TorchScript.

b batch, t positions, q queries, k keys, h query heads, g key-value heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tfkit.nn import count_positions, is_scripting, named

MIN_WIDTH = 16
"""Minimum width of a head that the kernel supports."""


class FlexMask(NamedTuple):
    """The value of `Context.mask` for a mask and a bias that are functions instead of tensors."""

    blocks: BlockMask | None
    """The keys that each query may attend to; None: all keys."""
    slopes: Tensor | None
    """ALiBi's slopes, [h]: the decrease of a score per position between query and key."""


class FlexAttention(nn.Module):
    """Queries [b, h, q, d], keys and values [b, g, k, d] and a `FlexMask` -> [b, h, q, d].

    Any other mask goes to `dense`, the core that takes its mask as a tensor.
    """

    def __init__(self, *, scale: float, cap: float | None, grouped: bool, dense: nn.Module) -> None:
        super().__init__()
        self.scale = scale
        self.cap = cap
        self.grouped = grouped
        self.dense = dense

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        # TorchScript skips this `if`; it would compile a condition that is joined to it.
        if not is_scripting():  # noqa: SIM102
            if isinstance(mask, FlexMask):
                return self.flex(q, k, v, mask)
        return self.dense(q, k, v, mask)

    def flex(self, q: Tensor, k: Tensor, v: Tensor, mask: FlexMask) -> Tensor:
        """Compute the forward with a `FlexMask`."""
        # A tensor, because a compiler that treats numbers as dynamic could not put one into the kernel.
        cap = None if self.cap is None else torch.full((), self.cap, device=q.device)
        bend = bending(cap, mask.slopes)
        if bend is None and mask.blocks is None:
            return self.dense(q, k, v, None)
        attend: Any = compiled(flex_attention) if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
        # In mixed precision a rotation may return float32, but the kernel takes one type.
        q, k = q.to(v.dtype), k.to(v.dtype)
        return attend(q, k, v, bend, mask.blocks, self.scale, self.grouped)

    def extra_repr(self) -> str:
        return named(f"scale={self.scale:.6g}", softcap=self.cap, grouped=self.grouped)


def serves(x: Tensor) -> bool:
    """Return True if the kernel supports the device of x. On other devices it is slow, or has no backward pass."""
    return x.is_cuda


def bending(cap: Tensor | None, slopes: Tensor | None) -> Callable[..., Tensor] | None:
    """Return a function that modifies a score: the soft-cap, then the slopes; None if there are neither."""
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
    rule: nn.Module | None = None,
) -> FlexMask:
    """Build the mask of the sequence x [b, t, d_model], for all layers that share it.

    A query attends to `left` keys before its position and `right` keys after it (None: unlimited), and to the first
    `prefix` [b] tokens. `padding` is True at tokens, [b, t], or True where token q may attend to token k, [b, q, k].
    `slopes` are the slopes of ALiBi by head. `rule` is an additional condition on positions, counted without padding.
    """
    slope_tensor = None if slopes is None else torch.tensor(slopes, device=x.device)
    if padding is None and left is None and right is None and rule is None:
        return FlexMask(None, slope_tensor)
    create = compiled(create_block_mask) if x.is_cuda and not torch.compiler.is_compiling() else create_block_mask
    batch, t = None if padding is None and prefix is None else x.size(0), x.size(1)
    positions = None if padding is None or rule is None else count_positions(x, padding, None)
    limits = readable(None if padding is None else padding.to(torch.bool), prefix, left=left, right=right)
    mask_mod = limits if rule is None else both(limits, rule, positions)
    return FlexMask(create(mask_mod, batch, None, t, t, x.device), slope_tensor)


def both(limits: Callable[..., Tensor], rule: nn.Module, positions: Tensor | None) -> Callable[..., Tensor]:
    """Return the conjunction of a mask and a rule for `positions` [b, t]. The default positions are the columns."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        fits = rule(q, k) if positions is None else rule(positions[b, q], positions[b, k])
        return limits(b, h, q, k) & fits

    return mask_mod


def readable(
    padding: Tensor | None, prefix: Tensor | None, *, left: int | None, right: int | None
) -> Callable[..., Tensor]:
    """Return the function that decides if a query may attend to a key; see `flex_mask`."""
    pairs = padding is not None and padding.dim() == 3
    index = None if prefix is None or padding is None or pairs else padding.long().cumsum(dim=1) - 1

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = k >= 0
        if right is not None:
            visible = visible & (k - q <= right)
        if left is not None:
            visible = visible & (q - k <= left)
        if prefix is not None:
            visible = visible | ((k if index is None else index[b, k]) < prefix[b])
        if padding is None:
            return visible
        return visible & (padding[b, q, k] if pairs else padding[b, k])

    return rule


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first use, once for all models."""
    return torch.compile(function)

"""The cores of multi-head attention: queries, keys, values and a mask (see `tfkit.nn.Context`) -> one vector per query.

`ScaledDotProduct` calls torch's fused kernels, `Eager` writes every step out, and `FlexAttention` in `flex.py` skips
masked keys. Their results are equal; `build(..., attention_backend=...)` chooses one.

A sink is a learned score of each query head that takes part in the softmax and has a value of zero: a query need not
read anything. It does not belong to a token, and is not cached.

b batch, q queries, k keys, h query heads, g key-value heads, r query heads for each of them, d width of a head.

Soft-cap: https://arxiv.org/abs/2408.00118. Sinks: https://arxiv.org/abs/2309.17453.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.nn import Rearrange, Softmax, named


class ScaledDotProduct(nn.Module):
    """Queries [b, h, q, d], keys and values [b, g, k, d] -> [b, h, q, d], by torch's fused kernels."""

    def __init__(self, *, scale: float, dropout: float, causal: bool, grouped: bool) -> None:
        super().__init__()
        self.scale = scale
        self.dropout = dropout
        self.causal = causal
        self.grouped = grouped

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        causal = self.causal and mask is None
        if causal and q.size(2) != k.size(2):  # only the newest token: it reads everything in the cache
            causal = False
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=self.scale, enable_gqa=self.grouped)

    def extra_repr(self) -> str:
        return named(f"scale={self.scale:.6g}", dropout=self.dropout, causal=self.causal, grouped=self.grouped)


class Eager(nn.Module):
    """Queries [b, h, q, d], keys and values [b, g, k, d] -> [b, h, q, d]; `softmax` returns the weights [b, h, q, k].

    With a soft-cap, scores are bent to stay within (-cap, cap) before the mask: cap * tanh(scores / cap).
    """

    def __init__(
        self,
        *,
        scale: float,
        dropout: float,
        heads: tuple[int, int],
        cap: float | None,
        softmax: nn.Module | None = None,
    ) -> None:
        super().__init__()
        h, g = heads
        self.scale = scale
        self.cap = cap
        self.dropout = dropout
        self.softmax = Softmax() if softmax is None else softmax
        # The queries of a group become rows of one matrix: its keys and values are read in place, not repeated.
        self.stack = Rearrange("b (g r) q d -> b g (r q) d", g=g, gr=h)
        self.unstack = Rearrange("b g (r q) d -> b (g r) q d", r=h // g)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.write_out(q, k, v, mask)

    def write_out(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the forward; subclasses call it for the queries that they do not handle in another way."""
        scores = self.unstack(self.stack(q * self.scale) @ k.mT)
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        weights = F.dropout(self.softmax(scores, mask), self.dropout, self.training)
        return self.unstack(self.stack(weights) @ v)

    def extra_repr(self) -> str:
        return named(f"scale={self.scale:.6g}", softcap=self.cap, dropout=self.dropout)


class SinkDotProduct(Eager):
    """`Eager` with sinks, by torch's fused kernels: the sink is a key before the others, with a value of zero.

    Its score comes from an additional channel that holds the sink in queries, 1 in this key and 0 in all others: so
    every kernel supports it, gradients included, without a mask for each head. A single query is faster without these
    copies.
    """

    def __init__(
        self, *, scale: float, dropout: float, causal: bool, heads: tuple[int, int], softmax: SinkSoftmax
    ) -> None:
        super().__init__(scale=scale, dropout=dropout, heads=heads, cap=None, softmax=softmax)
        self.causal = causal
        self.attend = ScaledDotProduct(scale=scale, dropout=dropout, causal=causal, grouped=heads[0] != heads[1])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if q.size(2) == 1:
            return self.write_out(q, k, v, mask)
        width, before = q.size(3), 0
        if self.causal and mask is None:
            before = 1  # a query at the position of the sink, because the flag compares positions
        sinks: Tensor = self.softmax.sinks  # type: ignore[assignment]
        channel = (sinks / self.scale).to(q.dtype)[:, None, None].expand(q.size(0), -1, q.size(2), 1)
        q = F.pad(torch.cat((q, channel), dim=3), (0, 0, before, 0))
        v = F.pad(v, (0, 1, 1, 0))
        k = F.pad(k, (0, 1, 1, 0))
        k[:, :, 0, width] = 1.0
        if mask is not None:
            mask = F.pad(mask, (1, 0), value=1.0 if mask.dtype == torch.bool else 0.0)
        return self.attend(q, k, v, mask)[:, :, before:, :width]


class SinkSoftmax(Softmax):
    """Softmax of scores [b, h, q, k] and of the sink of their head: the weights of the keys, [b, h, q, k].

    They sum to less than one, and are zero for a query without a key to read.
    """

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.empty(n_heads))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.sinks)

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        sinks = self.sinks.to(scores.dtype)[:, None, None].expand(scores.size(0), -1, scores.size(2), 1)
        return torch.softmax(torch.cat((scores, sinks), dim=3), dim=3)[..., :-1]

    def extra_repr(self) -> str:
        return named(n_heads=self.sinks.size(0))

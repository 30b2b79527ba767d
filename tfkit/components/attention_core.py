"""The cores of multi-head attention: queries, keys, values and a mask (see `tfkit.nn.Context`) -> one vector per query.

`ScaledDotProduct` leaves it to torch's fused kernels, `Eager` writes every step out, and `FlexAttention` in `flex.py`
skips what the mask hides. They compute the same; `build(..., attention_backend=...)` chooses.

b batch, q queries, k keys, h query heads, g key-value heads, d d_head.

Soft-cap: https://arxiv.org/abs/2408.00118.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.nn import Softmax


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
        if causal and q.size(2) != k.size(2):  # the newest token alone: it reads all that is kept
            causal = False
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
            scale=self.scale,
            enable_gqa=self.grouped,
        )


class Eager(nn.Module):
    """Queries [b, h, q, d], keys and values [b, g, k, d] -> [b, h, q, d]; `softmax` returns the weights [b, h, q, k].

    With a soft-cap, scores are bent to stay within (-cap, cap) before the mask: cap * tanh(scores / cap).
    """

    def __init__(self, *, scale: float, dropout: float, cap: float | None) -> None:
        super().__init__()
        self.scale = scale
        self.cap = cap
        self.dropout = dropout
        self.softmax = Softmax()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        # The queries of a group stand below each other: its keys and values are read where they lie, not repeated.
        stacked = (q * self.scale).reshape(k.size(0), k.size(1), -1, k.size(3))
        scores = (stacked @ k.transpose(2, 3)).view(q.size(0), q.size(1), q.size(2), k.size(2))
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        weights = F.dropout(self.softmax(scores, mask), self.dropout, self.training)
        return (weights.view(k.size(0), k.size(1), -1, k.size(2)) @ v).view(q.size())

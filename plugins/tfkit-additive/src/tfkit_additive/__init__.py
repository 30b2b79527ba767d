"""Additive attention: a query and a key are scored by a small network instead of their product.

https://arxiv.org/abs/1409.0473. All sums of a query and a key are in memory together, [b, h, q, k, d], which takes
d_head times the memory of the scores. This kind is meant for short sequences.

b batch, h heads, q queries, k keys, d width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.nn import Softmax, settings


class AdditiveConfig(tfkit.MultiHeadConfig):
    """Scores by a small network: weight . tanh(q + k)."""

    kind: Literal["additive"] = "additive"

    def check(self) -> None:
        """Raise `Invalid` for fields that require products of queries and keys."""
        super().check()
        for name in ("scale", "softcap", "sinks"):
            if getattr(self, name):
                raise tfkit.Invalid(name, f"additive attention has no `{name}`: it learns the scale of its scores")
        if self.rotary is not None:
            raise tfkit.Invalid(
                "position", "additive attention cannot use rotary positions, which act on products of queries and keys"
            )

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        return {**super().inner_values, **self.softmax_values("core.softmax")}

    def build_core(self, make: tfkit.Make, *, causal: bool) -> nn.Module:
        return Additive(self.n_heads, self.head_width, self.dropout)


class Additive(nn.Module):
    """Queries [b, h, q, d], keys and values [b, h, k, d] and a mask -> [b, h, q, d]."""

    extra_repr = settings

    def __init__(self, n_heads: int, d_head: int, dropout: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads, d_head))
        self.with_each_key = tfkit.Rearrange("b h q d -> b h q 1 d")
        self.with_each_query = tfkit.Rearrange("b h k d -> b h 1 k d")
        self.as_column = tfkit.Rearrange("h d -> h 1 d 1")
        self.as_scores = tfkit.Rearrange("b h q k 1 -> b h q k")
        self.softmax = Softmax()
        self.dropout = dropout

    def reset_parameters(self) -> None:
        bound = self.weight.size(1) ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        pairs = torch.tanh(self.with_each_key(q) + self.with_each_query(k))
        scores = self.as_scores(pairs @ self.as_column(self.weight))
        weights = self.softmax(scores, mask)
        return F.dropout(weights, self.dropout, self.training) @ v


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    """Register the config."""
    register(AdditiveConfig)


@tfkit.hookimpl
def tfkit_reference() -> dict[str, dict[str, Callable[..., Any]]]:
    """Return the formula."""
    from tfkit_additive.reference import additive

    return {"attention": {"additive": additive}}

"""Differential attention: the attention of one head minus the attention of a second head, times a learned factor.

    y      = (softmax(scale q1 k1') - lambda softmax(scale q2 k2')) v          of a pair of heads
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init
    head   = (1 - lambda_init) head_norm(y)

Head i of the first half of the heads and head i of the second half are a pair. Both attend to the same values of 2 d
channels: the values of their two key-value heads, joined. https://arxiv.org/abs/2410.05258.

b batch, q queries, k keys, h heads, g pairs of heads, r the two heads of a pair, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit.nn import Rearrange, named
from tfkit_mla.indexed import wide


class DifferentialConfig(tfkit.MultiHeadConfig):
    """The attention of one head minus the attention of a second head, times a learned factor."""

    kind: Literal["differential"] = "differential"
    n_kv_heads: tfkit.Count
    """Number of key-value heads, which form pairs, as the query heads do."""
    head_norm: tfkit.NormConfig = tfkit.slot("rmsnorm")
    """Norm of the difference of two heads, of 2 * d_head channels."""
    lambda_init: tfkit.Probability | None = None
    """Constant part of the factor of the second head; the output is multiplied by 1 - lambda_init. By default
    0.8 - 0.6 exp(-0.3 i) in layer i, from 0 on."""
    lambda_std: tfkit.Immaterial[tfkit.PositiveFloat] = 0.1
    """Standard deviation of the initial values of the four vectors that the learned part of the factor comes from."""

    def check(self) -> None:
        """Raise `Invalid` for heads that do not form pairs and groups, and for sinks."""
        super().check()
        if self.n_kv_heads % 2:
            message = f"n_kv_heads must be even, because key-value heads form pairs; got {self.n_kv_heads}"
            raise tfkit.Invalid("n_kv_heads", message)
        if self.n_heads % self.n_kv_heads:
            message = f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})"
            notes = [f"divisors of {self.n_heads}: {tfkit.divisors(self.n_heads)}"]
            raise tfkit.Invalid("n_kv_heads", message, notes=notes)
        if self.sinks:
            message = "`sinks` cannot be used: the kernel of sinks takes values as wide as queries"
            raise tfkit.Invalid("sinks", message, help="remove `sinks`")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        return {**super().inner_values, **self.softmax_values("core.attend.softmax")}

    def build_core(self, make: tfkit.Make, *, causal: bool) -> nn.Module:
        start = self.lambda_init
        if start is None:
            start = 0.8 - 0.6 * math.exp(-0.3 * (make.layer or 0))
        return Differential(
            attend=super().build_core(make, causal=causal),
            head_norm=make(self.head_norm, 2 * self.head_width),
            d_head=self.head_width,
            lambda_init=start,
            lambda_std=self.lambda_std,
        )


class Differential(nn.Module):
    """Queries [b, h, q, d], keys and values [b, g r, k, d] and a mask -> [b, h, q, d].

    `attend` computes both attentions. Each pair of heads gives 2 d channels, which are two heads of the output.
    """

    def __init__(
        self, *, attend: nn.Module, head_norm: nn.Module, d_head: int, lambda_init: float, lambda_std: float
    ) -> None:
        super().__init__()
        self.lambda_q1 = nn.Parameter(torch.empty(d_head))
        self.lambda_k1 = nn.Parameter(torch.empty(d_head))
        self.lambda_q2 = nn.Parameter(torch.empty(d_head))
        self.lambda_k2 = nn.Parameter(torch.empty(d_head))
        self.lambda_init = lambda_init
        self.lambda_std = lambda_std
        self.attend = attend
        self.head_norm = head_norm
        self.join_values = Rearrange("b (r g) k d -> b g k (r d)", r=2)
        self.split_pairs = Rearrange("b g q (r d) -> b (g r) q d", r=2)

    def reset_parameters(self) -> None:
        for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            nn.init.normal_(vector, std=self.lambda_std)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        v = self.join_values(v)
        first, second = self.attend(q, k, torch.cat((v, v), dim=1), mask).chunk(2, dim=1)
        y = self.head_norm(first - self.factor().to(second.dtype) * second)
        return self.split_pairs(y * (1 - self.lambda_init))

    def factor(self) -> Tensor:
        """Compute lambda, a single number in at least float32."""
        first = (wide(self.lambda_q1) * wide(self.lambda_k1)).sum().exp()
        second = (wide(self.lambda_q2) * wide(self.lambda_k2)).sum().exp()
        return first - second + self.lambda_init

    def extra_repr(self) -> str:
        return named(lambda_init=round(self.lambda_init, 6), lambda_std=self.lambda_std)

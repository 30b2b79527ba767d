"""Value residual: the values of each layer are a mix of its values and the values of the first layer.

    v = mix[0] * values of the first layer + mix[1] * values of the layer

Both weights are learned, initially 0.5. The first layer gives only the values of new tokens: caches contain mixed
values, so decoding needs no additional cache. https://arxiv.org/abs/2410.17897.
b batch, t new tokens, h heads, d width of a head.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.nn import Context, Linear, Rearrange, named, rotary_of, update_cache, wires_of

WIRE = "values"


class ValueResidualConfig(tfkit.AttentionConfig):
    """Multi-head attention whose values are a learned mix of its values and the values of the first layer."""

    kind: Literal["value_residual"] = "value_residual"
    first: bool = False
    """True for the layer that gives its values to all later layers."""
    bias: tfkit.Shared[bool] = True
    """If true, the projections have biases."""
    qk_norm: tfkit.NormConfig | None = None
    """Norm of each head's queries and keys, before they are rotated."""

    @property
    def cached(self) -> tuple[tfkit.Cached, ...]:
        return (tfkit.Cached(self.n_heads, self.head_width), tfkit.Cached(self.n_heads, self.head_width))

    @property
    def gives(self) -> tuple[str, ...]:
        return (WIRE,) if self.first else ()

    @property
    def takes(self) -> tuple[str, ...]:
        return () if self.first else (WIRE,)

    def check_giver(self, name: str, giver: tfkit.SublayerConfig) -> None:
        for field in ("n_heads", "head_width"):
            if getattr(giver, field, None) != getattr(self, field):
                raise tfkit.Invalid("first", f"`{field}` must be equal in the layer that gives {name}")

    def build(self, make: tfkit.Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        attention = GivingValues if self.first else MixedValues
        norms = None if self.qk_norm is None else [make(self.qk_norm, self.head_width) for _ in range(2)]
        rotate = None if self.rotary is None else self.rotary.build_rotation(self)
        return attention(self, norms=norms, rotate=rotate)


class ValueAttention(nn.Module):
    """Base class of both modules, with their common computations."""

    def __init__(self, config: ValueResidualConfig, *, norms: list[nn.Module] | None, rotate: nn.Module | None) -> None:
        super().__init__()
        h, d, width = config.n_heads, config.head_width, config.n_heads * config.head_width
        self.qkv = Linear(config.d_model, {"q": width, "k": width, "v": width}, bias=config.bias)
        self.q_norm = None if norms is None else norms[0]
        self.k_norm = None if norms is None else norms[1]
        self.rotate = rotate
        self.output = Linear(width, config.d_model, bias=config.bias, residual=True)
        self.split_heads = Rearrange("b t (h d) -> b h t d", h={"q": h, "k": h, "v": h}, d=d)
        self.merge_heads = Rearrange("b h t d -> b t (h d)")
        self.dropout = config.dropout

    def project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values of the new tokens, [b, h, t, d] each."""
        q, k, v = self.split_heads(self.qkv(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotate is not None:
            table = rotary_of(context)
            q, k = self.rotate(q, table), self.rotate(k, table)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attend to the new and the cached tokens; [b, t, d_model]."""
        k, v = update_cache(k, context, 0), update_cache(v, context, 1)
        dropout = self.dropout if self.training else 0.0
        return self.output(self.merge_heads(F.scaled_dot_product_attention(q, k, v, context.mask, dropout)))

    def extra_repr(self) -> str:
        return named(dropout=self.dropout)


class GivingValues(ValueAttention):
    """x [b, t, d_model] -> the same, and the values [b, h, t, d]."""

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, dict[str, Tensor]]:
        q, k, v = self.project(x, context)
        return self.attend(q, k, v, context), {"values": v}


class MixedValues(ValueAttention):
    """x [b, t, d_model], and the values of the first layer in the context -> [b, t, d_model]."""

    def __init__(self, config: ValueResidualConfig, **modules: Any) -> None:
        super().__init__(config, **modules)
        self.mix = nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.mix, 0.5)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self.project(x, context)
        return self.attend(q, k, self.mix[0] * wires_of(context)["values"] + self.mix[1] * v, context)

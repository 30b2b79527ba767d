"""Attention whose scores are cosines of queries and keys. https://arxiv.org/abs/2010.04245

b batch, h heads, q queries, k keys, t new tokens, d width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import tfkit
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TemplateConfig(tfkit.AttentionConfig):
    """Each score is the cosine of query and key times a learned factor of the head."""

    kind: Literal["template"] = "template"
    start: tfkit.PositiveFloat = 10.0
    """Initial value of the factors."""

    @property
    def cached(self) -> tuple[tfkit.Cached, ...]:
        return (tfkit.Cached(self.n_heads, self.head_width), tfkit.Cached(self.n_heads, self.head_width))

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        mixed = tfkit.InnerValue("merge_heads", 0, f"[b, {self.n_heads}, t, {self.head_width}]")
        return {**self.softmax_values("softmax"), "heads": mixed}

    def build(self, make: tfkit.Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        if d_memory is not None:
            return TemplateCrossAttention(self, d_memory, None)
        rotate = None if self.rotary is None else self.rotary.build_rotation(self)
        return TemplateAttention(self, self.d_model, rotate)


class TemplateAttention(nn.Module):
    """x [b, t, d_model] -> [b, t, d_model]."""

    def __init__(self, config: TemplateConfig, d_source: int, rotate: nn.Module | None) -> None:
        super().__init__()
        width = config.n_heads * config.head_width
        self.q = tfkit.Linear(config.d_model, width, bias=False)
        self.k = tfkit.Linear(d_source, width, bias=False)
        self.v = tfkit.Linear(d_source, width, bias=False)
        self.split_heads = tfkit.Rearrange("b t (h d) -> b h t d", d=config.head_width)
        self.rotate = rotate
        self.factor = nn.Parameter(torch.empty(config.n_heads, 1, 1))
        self.start = config.start
        self.softmax = tfkit.Softmax()
        self.dropout = config.dropout
        self.merge_heads = tfkit.Rearrange("b h q d -> b q (h d)")
        self.output = tfkit.Linear(width, config.d_model, bias=False, residual=True)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.factor, self.start)

    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        k = tfkit.update_cache(self.directions(self.k(x), context), context, 0)
        v = tfkit.update_cache(self.split_heads(self.v(x)), context, 1)
        return self.attend(self.directions(self.q(x), context), k, v, context.mask)

    def directions(self, x: Tensor, context: tfkit.Context) -> Tensor:
        """Queries or keys [b, t, h * d] -> their directions, rotated by their positions, [b, h, t, d]."""
        x = F.normalize(self.split_heads(x), dim=-1)
        rotary = context.rotary
        if self.rotate is not None and rotary is not None:
            x = self.rotate(x, rotary)
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Queries [b, h, q, d], keys and values [b, h, k, d] and a mask -> [b, q, d_model]."""
        scores = self.factor * torch.einsum("b h q d, b h k d -> b h q k", q, k)
        weights = F.dropout(self.softmax(scores, mask), self.dropout, self.training)
        return self.output(self.merge_heads(torch.einsum("b h q k, b h k d -> b h q d", weights, v)))


class TemplateCrossAttention(TemplateAttention):
    """x [b, t, d_model] and a memory [b, k, d_memory], which is cached when it is first read -> [b, t, d_model]."""

    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        q, memory, cache = self.directions(self.q(x), context), context.memory, context.cache
        if memory is None:
            assert cache is not None
            return self.attend(q, cache.tensors[0], cache.tensors[1], context.mask)
        k, v = self.directions(self.k(memory), context), self.split_heads(self.v(memory))
        if cache is not None:
            cache.tensors[0].copy_(k)
            cache.tensors[1].copy_(v)
        return self.attend(q, k, v, context.mask)


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(TemplateConfig)

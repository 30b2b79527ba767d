"""What all layers with the same attention share: mask, rotary table and position bias, made once per forward."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tfkit.component import (
    AttentionConfig,
    AttentionPositionConfig,
    Make,
    MaskConfig,
    RotaryConfig,
    ScoreBiasConfig,
)
from tfkit.nn import Context


@dataclass(frozen=True)
class View:
    """What decides the shared part of attention; layers with equal views share it."""

    mask: MaskConfig
    prefix: bool
    flag: bool
    """The causal mask is left to the attention's own flag."""
    position: AttentionPositionConfig | None = None
    heads: tuple[int, int] | None = None
    """Number and width of the heads, where there are positions."""
    attention: AttentionConfig | None = field(default=None, compare=False)
    """The first of the attentions that share it."""

    @classmethod
    def of(cls, attention: AttentionConfig | None, mask: MaskConfig, *, prefix: bool) -> View:
        """The view of a layer's attention."""
        if attention is None:
            return cls(MaskConfig(), prefix=False, flag=False)
        position = attention.position
        biased = isinstance(position, ScoreBiasConfig)
        flag = attention.causal_flag and mask == MaskConfig(right=0) and not prefix and not biased
        if position is None:
            return cls(mask, prefix, flag)
        return cls(mask, prefix, flag, position, (attention.n_heads, attention.head_width), attention)

    def build(self, make: Make) -> SharedContext:
        """Build the module that computes the shared part."""
        rotary = bias = None
        if isinstance(self.position, RotaryConfig):
            rotary = make(self.position, self.attention)
        elif isinstance(self.position, ScoreBiasConfig):
            bias = make(self.position, self.attention, self.mask.causal)
        return SharedContext(self.mask, flag=self.flag, rotary=rotary, position=bias)


class SharedContext(nn.Module):
    """x [b, t, d_model], padding mask [b, t], prefix lengths [b] -> the context of each layer's attention."""

    def __init__(self, mask: MaskConfig, *, flag: bool, rotary: nn.Module | None, position: nn.Module | None) -> None:
        super().__init__()
        self.left = mask.left
        self.right = mask.right
        self.flag = flag
        self.rotary = rotary
        self.position = position

    def forward(self, x: Tensor, padding: Tensor | None, prefix: Tensor | None) -> Context:
        positions = torch.arange(x.size(1), device=x.device)
        rotary: Tensor | None = None
        if self.rotary is not None:
            rotary = self.rotary(positions, x.size(1)).to(x.dtype)
        visible = self.visible(positions, positions, padding, prefix)
        mask = None if visible is None else additive(visible, x)
        if self.position is not None:
            bias = self.position(positions, positions).to(x.dtype)
            mask = bias if mask is None else bias + mask
        return Context(mask, rotary, None)

    def visible(self, queries: Tensor, keys: Tensor, padding: Tensor | None, prefix: Tensor | None) -> Tensor | None:
        """Which keys each query reads, bool [b or 1, 1, q or 1, k]; None where the causal flag says it, or it is all.

        Args:
            queries: their positions, [q].
            keys: their positions, [k].
            padding: True where a key is a token, [b, k].
            prefix: how many tokens at the start every query reads, [b].
        """
        visible: Tensor | None = None
        if padding is None and self.flag:
            return visible
        if self.right is not None:
            visible = (keys[None, :] - queries[:, None] <= self.right)[None, None]
        if self.left is not None:
            near = (queries[:, None] - keys[None, :] <= self.left)[None, None]
            visible = near if visible is None else visible & near
        if prefix is not None and visible is not None:
            index = keys[None, :] if padding is None else padding.long().cumsum(dim=1) - 1
            visible = visible | (index < prefix[:, None])[:, None, None, :]
        if padding is not None:
            tokens = padding.to(torch.bool)[:, None, None, :]
            visible = tokens if visible is None else visible & tokens
        return visible


def additive(visible: Tensor, like: Tensor) -> Tensor:
    """What to add to the scores: 0 where `visible`, minus infinity elsewhere, in the type of `like`.

    Made once per forward: given a bool mask, the attention kernel would make the same in every layer.
    """
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill(~visible, -math.inf)

"""Values that layers with equal attention share, computed once per forward: mask, rotary table, bias, temperature.

Rotary and sinusoidal tables, ALiBi slopes and masks are computed once per forward from a few numbers: no buffer exists
that a cast to bfloat16 could corrupt or that `to_empty` could lose. A mask is passed as None only to attention that
declares a causal flag for its backend (`causal_flag`); every other kind gets the mask written out.

Here sequences are entire. `cached_keys.py` adds the keys in a cache, for sequences that are read step by step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tfkit.component import (
    AttentionBackend,
    AttentionConfig,
    AttentionPositionConfig,
    Make,
    MaskConfig,
    TemperatureConfig,
)
from tfkit.components.cached_keys import CachedKeys
from tfkit.components.flex import flex_mask, serves
from tfkit.components.temperature import Temperature
from tfkit.nn import Cache, Context, count_positions, is_pairwise, is_scripting, named, one_run, token_order


@dataclass(frozen=True)
class ContextKey:
    """The values that determine the context of an attention; layers with equal keys share it."""

    mask: MaskConfig
    prefix: bool
    flag: bool
    """True if the causal mask is left to the attention's own flag."""
    flex: bool = False
    """True if the mask may be a rule for FlexAttention."""
    temperature: TemperatureConfig | None = None
    blocks: bool = False
    """True if tokens of a block attend to each other."""
    counts: bool = False
    """True if more than the distance of two tokens matters, so that positions are counted without padding."""
    position: AttentionPositionConfig | None = None
    heads: tuple[int, int] | None = None
    """Number and width of the heads, if there are positions."""
    attention: AttentionConfig | None = field(default=None, compare=False)
    """The first of the attentions that share the context."""

    @classmethod
    def of(
        cls,
        attention: AttentionConfig | None,
        mask: MaskConfig,
        *,
        prefix: bool,
        blocks: bool,
        backend: AttentionBackend,
    ) -> ContextKey:
        """Return the key of a layer's attention."""
        if attention is None:
            return cls(MaskConfig(), prefix=False, flag=False)
        plain = mask == MaskConfig(right=0) and not (prefix or blocks) and attention.score_bias is None
        temperature, position = attention.query_temperature, attention.position
        return cls(
            mask,
            prefix,
            flag=plain and attention.causal_flag(backend),
            flex=attention.flex_mask(backend) and not blocks,
            blocks=blocks,
            temperature=temperature,
            counts=temperature is not None or attention.counts_tokens,
            position=position,
            heads=None if position is None else (attention.n_heads, attention.head_width),
            attention=attention,
        )

    @property
    def window(self) -> int | None:
        """Number of latest tokens that a query attends to at most; None: unlimited."""
        return None if self.prefix else self.mask.window

    @property
    def reads_all(self) -> bool:
        """True if the newest token reads everything that is cached."""
        return self.mask.causal and self.mask.rule is None and (self.mask.left is None or self.window is not None)

    def build(self, make: Make, *, gaps: bool, counted: bool) -> AttentionContext:
        """Build the module that computes the context; with `gaps`, padding may lie between tokens.

        With `counted`, positions are counted; otherwise they are an input.
        """
        attention, slopes = self.attention, None
        rotary: nn.Module | None = None
        position: nn.Module | None = None
        relative: nn.Module | None = None
        if attention is not None and attention.rotary is not None:
            rotary = make(attention.rotary, attention)
        if attention is not None and attention.score_bias is not None:
            position = make(attention.score_bias, attention, self.mask.causal)
            slopes = attention.score_bias.slopes(attention)
        if attention is not None and attention.content_scores is not None:
            relative = make(attention.content_scores, attention, self.mask.causal and not (self.prefix or self.blocks))
        rule = None if self.mask.rule is None else make(self.mask.rule)
        return AttentionContext(
            self,
            rotary=rotary,
            position=position,
            relative=relative,
            slopes=slopes if counted else None,
            rule=rule,
            gaps=gaps,
        )


class AttentionContext(nn.Module):
    """The values that the attentions of several layers share, from sequences x [b, t, d_model].

    `padding` is a mask [b, t] or a pairwise mask, `prefix` has lengths [b] or the blocks of
    tokens [b, t], and `cached` is None for entire sequences.
    `token_positions` are the positions of the tokens, [b, t] or [b, t, n]; None if they are counted. Masks always count
    the tokens.
    """

    def __init__(
        self,
        key: ContextKey,
        *,
        rotary: nn.Module | None,
        position: nn.Module | None,
        relative: nn.Module | None = None,
        slopes: Sequence[float] | None,
        rule: nn.Module | None = None,
        gaps: bool = False,
    ) -> None:
        super().__init__()
        self.left = key.mask.left
        self.right = key.mask.right
        self.flag = key.flag
        self.reads_all = key.reads_all
        self.ring = key.window is not None
        self.rotary = rotary
        self.position = position
        self.relative = relative
        self.temperature = Temperature(key.temperature) if key.temperature else None
        self.counts = key.counts
        self.slopes = None if slopes is None else list(slopes)
        self.rule = rule
        self.gaps = gaps or rule is not None
        self.near = relative is not None or rotary is not None or position is not None or key.mask.left is not None
        self.flex = key.flex and not gaps and (position is None or slopes is not None)

    def forward(  # noqa: C901  TorchScript compiles it
        self,
        x: Tensor,
        padding: Tensor | None,
        prefix: Tensor | None,
        cached: CachedKeys | None = None,
        token_positions: Tensor | None = None,
    ) -> Context:
        cache: Cache | None = None
        tokens, n_keys = padding, x.size(1)
        if cached is None:
            queries = torch.arange(x.size(1), device=x.device)[None]
            if self.gaps:
                queries = count_positions(x, padding, None)
            elif self.near and padding is not None:
                tokens = one_run(padding)
            keys = queries
        else:
            queries, keys, tokens, n_keys, cache = cached
        positions = count_positions(x, padding, None) if self.counts and cached is None else queries
        positions = positions if token_positions is None else token_positions
        rotary: Tensor | None = None
        if self.rotary is not None:
            rotary = self.rotary(positions, n_keys).to(x.dtype)
        temperature: Tensor | None = None
        if self.temperature is not None:
            temperature = self.temperature(positions).to(x.dtype)
        # TorchScript skips this `if`; it would compile a condition that is joined to it.
        if not is_scripting():  # noqa: SIM102
            if self.flex and cached is None and serves(x):
                flex = self.flex_mask(x, padding, prefix)
                return Context(flex, rotary, None, temperature=temperature)
        mask: Tensor | None = None
        if tokens is not None or not (self.flag if cached is None else self.reads_everything(queries, keys)):
            counted = self.gaps or cached is not None
            visible = self.visible(queries, keys, tokens, prefix, padding, counted=counted)
            mask = None if visible is None else additive(visible, x)
        ring = keys if self.ring and cached is not None else None
        if token_positions is not None:
            queries, keys = token_positions, token_positions
        if self.position is not None:
            bias = self.position(queries, keys).to(x.dtype)
            mask = bias if mask is None else bias + mask
        relative: tuple[Tensor, Tensor] | None = None
        if self.relative is not None:
            relative = self.relative(queries, keys)
        return Context(mask, rotary, None, cache, temperature, relative=relative, key_positions=ring)

    def reads_everything(self, queries: Tensor, keys: Tensor) -> bool:
        """Return True if no mask is needed, because the causal flag replaces it or the newest token reads all keys."""
        return (self.flag and queries.size(1) == keys.size(1)) or (self.reads_all and queries.size(1) == 1)

    def flex_mask(self, x: Tensor, padding: Tensor | None, prefix: Tensor | None) -> Any:
        """Return the mask as a `FlexMask`; None if the causal flag replaces it."""
        if self.flag and padding is None:
            return None
        return flex_mask(x, padding, prefix, left=self.left, right=self.right, slopes=self.slopes, rule=self.rule)

    def visible(
        self,
        queries: Tensor,
        keys: Tensor,
        tokens: Tensor | None,
        prefix: Tensor | None,
        padding: Tensor | None,
        counted: bool,
    ) -> Tensor | None:
        """Return the keys that each query may attend to, bool [b or 1, 1, q or 1, k]; None for all keys.

        `queries` and `keys` are positions, [b or 1, q] and [b or 1, k], `counted` if without padding; `tokens` is True
        where a key is a token, [b, k], or where a query may read it, [b, q, k]; the first `prefix` [b] tokens are read
        by all queries, or the tokens of a block by all queries of the block: `prefix` [b, q], with `padding`.
        """
        ends = queries
        if prefix is not None and prefix.dim() == 2:
            ends = block_ends(prefix, queries, padding)
            prefix = None
        visible: Tensor | None = None
        if self.right is not None:
            visible = keys[:, None, :] - ends[:, :, None] <= self.right
        if self.left is not None:
            near = queries[:, :, None] - keys[:, None, :] <= self.left
            visible = near if visible is None else visible & near
        if prefix is not None and visible is not None:
            index = keys if tokens is None or counted or is_pairwise(tokens) else tokens.long().cumsum(dim=1) - 1
            visible = visible | (index < prefix[:, None])[:, None, :]
        if self.rule is not None:
            fits = self.rule(queries[:, :, None], keys[:, None, :])
            visible = fits if visible is None else visible & fits
        if tokens is not None:
            real = (tokens if is_pairwise(tokens) else tokens[:, None, :]).to(torch.bool)
            visible = real if visible is None else visible & real
        return None if visible is None else visible[:, None]

    def extra_repr(self) -> str:
        causal = self.right == 0
        window = None if self.left is None or not causal else self.left + 1
        if causal:
            return named(causal=True, window=window)
        sides = {side: number for side, number in (("left", self.left), ("right", self.right)) if number is not None}
        return ", ".join(f"{side}={number}" for side, number in sides.items())


def block_ends(blocks: Tensor, positions: Tensor, padding: Tensor | None) -> Tensor:
    """Return the position of the last token of the block of each token, [b, t].

    A block is a run of tokens of one document with the same number above 0 in `blocks` [b, t]. `positions` [b or 1, t]
    increase within a document, and `padding` is a mask [b, t] or a pairwise mask.
    """
    order: Tensor | None = None
    positions = positions.expand_as(blocks)
    if padding is not None:
        order = token_order(padding.to(torch.bool))[1]
        blocks = torch.zeros_like(blocks).scatter(1, order, blocks)
        positions = torch.zeros_like(positions).scatter(1, order, positions)
    joined = (blocks[:, 1:] == blocks[:, :-1]) & (blocks[:, 1:] > 0) & (positions[:, 1:] > positions[:, :-1])
    run = functional.pad(~joined, (1, 0)).long().cumsum(dim=1)
    ends = torch.zeros_like(positions).scatter_reduce(1, run, positions, "amax").gather(1, run)
    return ends if order is None else ends.gather(1, order)


def additive(visible: Tensor, like: Tensor) -> Tensor:
    """Return an additive mask of the scores: 0 where `visible`, minus infinity elsewhere, in the dtype of `like`.

    It is made once per forward: given a bool mask, the attention kernel would make it again in every layer.
    """
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill(~visible, -math.inf)


def cross_context(x: Tensor, memory: Tensor | None, mask: Tensor | None, caches: list[list[Tensor]] | None) -> Context:
    """Return the context of all cross-attentions, with queries x [b, q, d_model].

    The memory [b, k, d_memory] is None once it is in the caches of the layers; `mask` is False at its padding, [b, k].
    """
    nothing: list[Tensor] = []
    added = None if mask is None else additive(mask.to(torch.bool)[:, None, None, :], x)
    return Context(added, None, memory, None if caches is None else Cache(nothing, x, 0, 0))

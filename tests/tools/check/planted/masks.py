"""Bugs of masks: queries that attend to hidden keys, or ignore visible keys."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tfkit.components import (
    context,
    rope_scaling,
    stack,
)
from tfkit.components.attention import CrossAttention, MultiHeadConfig
from tfkit.components.attention_core import ScaledDotProduct
from tfkit.components.context import AttentionContext
from tfkit.nn import Context

from .bug import fused, plant

visible = AttentionContext.visible
memory = CrossAttention.memory
forward_of_yarn = rope_scaling.YarnScaling.forward


@plant(
    "the causal mask is skipped", "facebookresearch/xformers#103", "llama", "look-ahead", ScaledDotProduct, "forward"
)
def no_causal_flag(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return fused(self, q, k, v, mask, is_causal=False)


@plant(
    "the causal mask is dropped where dropout is set",
    "keras-team/keras#23038",
    "gpt2",
    "look-ahead",
    ScaledDotProduct,
    "forward",
)
def no_flag_with_dropout(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return fused(self, q, k, v, mask, is_causal=self.causal and mask is None and self.dropout == 0)


@plant(
    "a block's mask switches the causal one off",
    "huggingface/transformers#48748",
    "mistral",
    "look-ahead",
    AttentionContext,
    "visible",
)
def padding_alone(self: Any, queries: Tensor, keys: Tensor, tokens: Any, prefix: Any, counted: bool) -> Any:
    return (
        torch.ones(1, 1, queries.size(1), keys.size(1), dtype=torch.bool) if tokens is None else tokens[:, None, None]
    )


@plant(
    "the causal mask is missing in layers with a window",
    "facebookresearch/xformers#1135",
    "mistral",
    "look-ahead",
    AttentionContext,
    "visible",
)
def without_causal(self: Any, queries: Tensor, keys: Tensor, tokens: Any, prefix: Any, counted: bool) -> Any:
    right, self.right = self.right, None if self.left is not None else self.right
    actual = visible(self, queries, keys, tokens, prefix, counted)
    self.right = right
    return actual


@plant(
    "a core without the causal flag is given no mask",
    "huggingface/transformers#30652",
    "gemma2",
    "look-ahead",
    MultiHeadConfig,
    "causal_flag",
)
def always_flagged(self: Any, backend: Any) -> bool:
    return True


@plant("a bool mask is inverted", "rasbt/LLMs-from-scratch#1062", "bert", "extents", context, "additive")
def inverted(visible: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(visible.shape, dtype=like.dtype).masked_fill(visible, -math.inf)


@plant("an encoder is causal by a default", "pytorch/torchtitan#2309", "bert", "extents", ScaledDotProduct, "forward")
def always_causal(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return fused(self, q, k, v, mask, is_causal=mask is None)


@plant(
    "padding is forgotten where there is a causal mask",
    "TransformerLensOrg/TransformerLens#1198",
    "gpt2",
    "padding",
    AttentionContext,
    "visible",
)
def without_padding(self: Any, queries: Tensor, keys: Tensor, tokens: Any, prefix: Any, counted: bool) -> Any:
    return visible(self, queries, keys, tokens if counted else None, prefix, counted)


@plant(
    "the window is one key too wide",
    "huggingface/transformers#26792",
    "mistral",
    "extents",
    AttentionContext,
    "visible",
)
def wider(self: Any, queries: Tensor, keys: Tensor, tokens: Any, prefix: Any, counted: bool) -> Any:
    left, self.left = self.left, None if self.left is None else self.left + 1
    actual = visible(self, queries, keys, tokens, prefix, counted)
    self.left = left
    return actual


@plant(
    "the right side of a window is strict",
    "huggingface/transformers#47162",
    "modernbert",
    "extents",
    AttentionContext,
    "visible",
)
def strict(self: Any, queries: Tensor, keys: Tensor, tokens: Any, prefix: Any, counted: bool) -> Any:
    right, self.right = self.right, None if self.right is None else self.right - 1
    actual = visible(self, queries, keys, tokens, prefix, counted)
    self.right = right
    return actual


@plant("-10000 stands for minus infinity", "a number that is large enough", "gpt2", "extents", context, "additive")
def large_number(visible: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(visible.shape, dtype=like.dtype).masked_fill(~visible, -1e4)


@plant(
    "a query without a key reads the mean of all",
    "-10000 for minus infinity",
    "bart",
    "fully-masked",
    context,
    "additive",
)
def mean_of_all(visible: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(visible.shape, dtype=like.dtype).masked_fill(~visible, torch.finfo(like.dtype).min)


@plant(
    "the encoder's padding is forgotten in cross-attention",
    "huggingface/transformers#47946",
    "bart",
    "padding",
    stack,
    "cross_context",
)
def memory_unmasked(x: Tensor, memory: Any, mask: Any, caches: Any) -> Context:
    return context.cross_context(x, memory, None, caches)


@plant("packed documents see each other", "huggingface/nanoVLM#204", "gpt2", "documents", AttentionContext, "visible")
def all_documents(self: Any, queries: Tensor, keys: Tensor, tokens: Any, prefix: Any, counted: bool) -> Any:
    return visible(self, queries, keys, None if tokens is None or tokens.dim() == 3 else tokens, prefix, counted)


@plant(
    "a memory has positions",
    "cross-attention that reuses self-attention",
    "bart",
    "memory-order",
    CrossAttention,
    "memory",
)
def with_positions(self: Any, context: Context) -> tuple[Tensor, Tensor]:
    k, v = memory(self, context)
    return k * torch.linspace(0.5, 1.5, k.size(2))[:, None], v


@plant(
    "a rotary scaling turns by its factor twice",
    "a factor that is squared",
    "yarn",
    "meaning",
    rope_scaling.YarnScaling,
    "forward",
)
def twice(self: Any, n_keys: int, device: Any) -> Tensor:
    return forward_of_yarn(self, n_keys, device) / self.factor

"""Bugs of caches, which appear when sequences are read in steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tfkit.components import cached_keys, stack
from tfkit.components.attention import CrossAttention
from tfkit.components.attention_core import ScaledDotProduct
from tfkit.decoding import cached as decoding
from tfkit.decoding import modules
from tfkit.nn import Context, Past
from tfkit.tools.check.reduced import WINDOW

from .bug import fused, plant

held = cached_keys.held
place = cached_keys.place
make_caches = decoding.CachedModel._make_caches
memory = CrossAttention.memory


@plant(
    "the causal flag is aligned to the first key",
    "pytorch/executorch#21749",
    "llama",
    "cached",
    ScaledDotProduct,
    "forward",
)
def top_left(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if q.size(2) == k.size(2) or q.size(2) == 1:
        return fused(self, q, k, v, mask)
    return fused(self, q, k, v, None, attn_mask=torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril())


@plant(
    "one query over many keys reads the first",
    "pytorch/executorch#22443",
    "llama",
    "cached",
    ScaledDotProduct,
    "forward",
)
def first_key(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return fused(self, q, k, v, mask, is_causal=self.causal and mask is None)


@plant("the mask has one key more than the ring", "ml-explore/mlx-lm#390", "mistral", "cached", cached_keys, "held")
def one_more(last: Tensor, n: int, n_slots: int) -> Tensor:
    return held(last, n, n_slots) - (n == n_slots)


@plant(
    "the window is ignored for a single token",
    "ml-explore/mlx-lm#843",
    "mistral",
    "cached",
    decoding.CachedModel,
    "_make_caches",
)
def caches_of_all(self: Any, batch: int) -> None:
    for _, needs in self._parts.step_nodes.values():
        for name in ("caches", "memory_caches"):
            layers = tuple(tuple(replace(item, window=None) for item in value) for value in getattr(needs, name))
            object.__setattr__(needs, name, layers)
    make_caches(self, batch)


@plant(
    "a prompt overwrites what its own queries read",
    "Lightning-AI/litgpt#2215",
    "mistral",
    "cached",
    stack,
    "place",
)
def overwritten(queries: Tensor, padding: Any, past: Past, n_slots: int) -> Any:
    cached = place(queries, padding, past, n_slots)
    if cached.cache.before == 0:
        return cached
    cache = cached.cache._replace(before=0, after=n_slots)
    return cached._replace(cache=cache, keys=held(queries[:, -1:], n_slots, n_slots), tokens=None)


@plant(
    "a piece of several tokens drops the oldest in the cache",
    "ml-explore/mlx-lm#1673",
    "llama",
    "cached",
    stack,
    "place",
)
def oldest_dropped(queries: Tensor, padding: Any, past: Past, n_slots: int) -> Any:
    cached = place(queries, padding, past, n_slots)
    if past.start == 0 or queries.size(1) == 1:
        return cached
    first = cached.keys > 0
    return cached._replace(tokens=first if cached.tokens is None else cached.tokens & first)


@plant(
    "every layer has the slots of the first",
    "fla-org/flash-linear-attention#748",
    "gemma2",
    "cached",
    stack,
    "place",
)
def of_the_first_layer(queries: Tensor, padding: Any, past: Past, n_slots: int) -> Any:
    return place(queries, padding, past, min(n_slots, WINDOW + 1))


@plant(
    "the cache of cross-attention has the decoder's window",
    "huggingface/transformers#46111",
    "bart",
    "cached",
    CrossAttention,
    "memory",
)
def cut_memory(self: Any, context: Context) -> tuple[Tensor, Tensor]:
    k, v = memory(self, context)
    if context.cache is not None:
        k, v = k.clone(), v.clone()
        k[:, :, :4], v[:, :, :4] = 0.0, 0.0
    return k, v


@plant("padding takes slots of the cache", "TransformerLensOrg/TransformerLens#772", "gpt2", "cached", stack, "place")
def padding_kept(queries: Tensor, padding: Any, past: Past, n_slots: int) -> Any:
    return place(queries, None if padding is None else torch.ones_like(padding), past, n_slots)


@plant(
    "caches stay in float32 under a half model",
    "TransformerLensOrg/TransformerLens#1260",
    "gpt2",
    "cached-types",
    decoding,
    "sharded_dtype",
)
def in_float32(model: nn.Module) -> torch.dtype:
    return torch.float32


@plant("`keep` returns the first positions", "logits to keep", "gpt2", "cached-types", modules, "last_positions")
def the_first(x: Tensor, keep: int) -> Tensor:
    return x if keep == 0 else x[:, :keep]

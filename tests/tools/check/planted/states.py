"""Bugs of mixers: states, and the order in which tokens of a row enter them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfkit.components import layer, stack
from tfkit.decoding import cached as decoding
from tfkit.nn import Context
from tfkit.torch_private.tensors import map_nested

from .bug import plant

token_order = stack.token_order
cache_sizes = decoding.cache_sizes
repeat = decoding.CachedModel.repeat


@plant(
    "padding enters a convolution",
    "pads that are only set to zero",
    "mixers",
    "padding",
    stack,
    "token_order",
)
def in_place(mask: Tensor) -> tuple[Tensor, Tensor, None]:
    return mask, torch.arange(mask.size(1)).expand_as(mask), None


@plant("padding counts as tokens of a state", "a mask that is not applied", "mixers", "state", stack, "token_order")
def all_tokens(mask: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    padding, order, documents = token_order(mask)
    return torch.ones_like(padding), order, documents


@plant(
    "a wide state is stored in bfloat16",
    "sums of many small numbers",
    "mixers",
    "cached-types",
    decoding,
    "cache_sizes",
)
def narrow(parts: Any, batch: int, length: int, memory_length: Any, dtype: torch.dtype) -> Any:
    sizes = cache_sizes(parts, batch, length, memory_length, dtype)
    return {name: [[(shape, dtype) for shape, _ in layer] for layer in layers] for name, layers in sizes.items()}


@plant(
    "repeated rows get the states of other rows",
    "rows that are tiled",
    "mixers",
    "cached",
    decoding.CachedModel,
    "repeat",
)
def tiled(self: Any, n: int) -> None:
    before = map_nested(torch.clone, self._cache)
    repeat(self, n)
    self._cache = map_nested(lambda tensor: tensor.repeat(n, 1, 1, 1), before)


@plant(
    "two mixers of a layer share one state",
    "an offset that is forgotten",
    "mixers",
    "cached",
    layer,
    "cache_of_next",
)
def the_first(context: Context, before: int) -> Context:
    return context

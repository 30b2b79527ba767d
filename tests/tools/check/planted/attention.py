"""Bugs of attention: heads, scales and caps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tfkit.components.attention_core import Eager, ScaledDotProduct

from .bug import fused, plant


@plant(
    "heads of keys and values are tiled, not interleaved",
    "onnx/onnx#7274",
    "llama",
    "meaning",
    ScaledDotProduct,
    "forward",
)
def tiled(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    times = q.size(1) // k.size(1)
    return fused(self, q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), mask, enable_gqa=False)


@plant(
    "the scale is not handed to the fused kernel",
    "huggingface/pytorch-image-models#2280",
    "scaled",
    "backends",
    ScaledDotProduct,
    "forward",
)
def own_scale(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return fused(self, q, k, v, mask, scale=1.0)


@plant(
    "a scale of the spec has no effect",
    "huggingface/transformers#44380",
    "scaled",
    "values",
    ScaledDotProduct,
    "forward",
)
def default_scale(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return fused(self, q, k, v, mask, scale=None)


@plant(
    "the norm of queries divides in one path", "lucidrains/x-transformers#190", "scaled", "backends", Eager, "write_out"
)
def divided(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = self.unstack(self.stack(q / self.scale) @ k.mT)
    return self.unstack(self.stack(self.softmax(scores, mask)) @ v)


@plant("the soft-cap is ignored", "scores that grow without bound", "capped", "values", Eager, "write_out")
def no_softcap(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = self.unstack(self.stack(q * self.scale) @ k.mT)
    return self.unstack(self.stack(self.softmax(scores, mask)) @ v)


@plant(
    "one head is twice as large as the others",
    "a head that is treated separately",
    "llama",
    "head-order",
    ScaledDotProduct,
    "forward",
)
def first_is_larger(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    actual = fused(self, q, k, v, mask).clone()
    actual[:, 0] *= 2
    return actual

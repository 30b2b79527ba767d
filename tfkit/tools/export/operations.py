"""ONNX translations of torch operations whose translation by the exporter is missing or differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset20

op: Any = opset20
"""ONNX operators, with the type `Any`: their annotations do not describe values of the exporter."""


def translate_remainder(self: Any, other: Any) -> Any:
    """Translate `remainder`.

    The exporter's translation supports only a constant divisor, and the number of cache slots is dynamic.
    """
    return op.Mod(self, op.CastLike(other, self))


def translate_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Translate scaled dot-product attention.

    A query without any key returns zeros. The exporter's translation returns NaN.

    b batch, q queries, k keys, h query heads, g key-value heads, d d_head.

    Args:
        query: [b, h, q, d].
        key: [b, g, k, d].
        value: [b, g, k, d].
        attn_mask: bool, True to attend, or numbers to add to the scores; broadcast to [b, h, q, k].
        dropout_p: always 0 here.
        is_causal: hide later keys.
        scale: factor of the scores; by default d ** -0.5.
        enable_gqa: True if groups of query heads share a key-value head.
    """
    if enable_gqa:
        key, value = _repeated_heads(key, query), _repeated_heads(value, query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = op.MatMul(op.Mul(query, op.CastLike(scale, query)), op.Transpose(key, perm=[0, 1, 3, 2]))
    hidden = op.CastLike(-math.inf, query)
    if is_causal:
        size = op.Concat(op.Shape(query, start=2, end=3), op.Shape(key, start=2, end=3), axis=0)
        seen = op.Trilu(op.Expand(op.Constant(value_int=1), size), upper=0)
        scores = op.Where(op.Cast(seen, to=9), scores, hidden)
    if attn_mask is not None:
        is_bool = attn_mask.dtype == 9
        scores = op.Where(attn_mask, scores, hidden) if is_bool else op.Add(scores, attn_mask)
    weights = op.Softmax(scores, axis=-1)
    if attn_mask is not None:
        weights = op.Where(op.IsNaN(weights), op.CastLike(0.0, query), weights)
    return op.MatMul(weights, value)


def _repeated_heads(x: Any, query: Any) -> Any:
    """Repeat each of the heads [b, g, k, d] in sequence, so that their number matches the query heads."""
    n = query.shape[1] // x.shape[1]
    expanded = op.Expand(op.Unsqueeze(x, [2]), op.Constant(value_ints=[1, 1, n, 1, 1]))
    shape = op.Concat(op.Shape(query, end=2), op.Shape(x, start=2), axis=0)
    return op.Reshape(expanded, shape)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.remainder.Scalar: translate_remainder,
    torch.ops.aten.scaled_dot_product_attention.default: translate_attention,
}

"""Attention: project, clip, norms, rotate, temperature, scores, softmax, values, gate, norm, project.

t positions, q queries, k keys, h query heads, g key-value heads, d width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfkit.component import RotaryConfig, ScoreBiasConfig
from tfkit.reference.model import Array, Function, Part
from tfkit.reference.pointwise import bias_of


@dataclass(frozen=True)
class Scope:
    """The sequence that an attention reads, and what it may read of it."""

    read: Array
    """[k, width]: the sequence itself, or a memory."""
    visible: Array
    """[q, k], True where a query reads a key."""
    positions: Array | None = None
    """[t], counted without padding; None in cross-attention, which has none."""
    causal: bool = False
    """True if no query reads a later key."""
    position: Part | None = None
    """The component in the slot `position`, with its weights."""


def multi_head(part: Part, x: Array, scope: Scope, g: int, core: Function | None = None) -> Array:
    """Multi-head attention with g heads of keys and values; a kind may have another core than `dot_product`."""
    config, position = part.config, scope.position
    d = config.d_head or config.d_model // config.n_heads
    q, k, v = _projected(part, x, scope.read, [config.n_heads * d, (config.n_heads + g) * d])
    if config.clip is not None:
        q, k, v = (np.clip(one, -config.clip, config.clip) for one in (q, k, v))
    q = part.optional("project.q_norm", config.qk_norm_full, q)
    k = part.optional("project.k_norm", config.qk_norm_full, k)
    q, k, v = (one.reshape(len(one), -1, d).swapaxes(0, 1) for one in (q, k, v))
    q, k = part.optional("q_norm", config.qk_norm, q), part.optional("k_norm", config.qk_norm, k)
    v = part.optional("v_norm", config.value_norm, v)
    if position is not None and isinstance(position.config, RotaryConfig):
        q, k = (position(one, scope.positions, len(scope.read)) for one in (q, k))
    q = part.optional("q_norm_rotated", config.qk_norm_rotated, q)
    k = part.optional("k_norm_rotated", config.qk_norm_rotated, k)
    if config.temperature is not None and scope.positions is not None:  # https://arxiv.org/abs/2501.19399
        times = (scope.positions + config.temperature.offset) // config.temperature.original_max_len
        q = q * (1 + config.temperature.beta * np.log1p(times))[:, None]
    bias = np.zeros((len(q), 1, 1))
    if position is not None and isinstance(position.config, ScoreBiasConfig):
        bias = position(config, scope.positions, scope.positions, scope.causal)
    y = (core or dot_product)(part, q, k, v, bias, scope.visible)
    if config.gate is not None:  # a factor of each channel or head: https://arxiv.org/abs/2505.06708
        gate = part.at("gate").optional("activation", config.gate.activation, part.at("gate.linear").linear(x, False))
        y = y * gate.reshape(len(x), config.n_heads, -1)
    y = part.optional("inner_norm", config.inner_norm, y.reshape(len(y), -1))
    return part.at("output").linear(y, bias_of(part, "o"))


def _projected(part: Part, x: Array, read: Array, ends: list[int]) -> list[Array]:
    """Queries of x, keys and values of what it reads; one matrix may hold all three, in this order."""
    if part.at("project.qkv").path + ".weight" in part.model.weights:
        return np.split(part.at("project.qkv").linear(x, bias_of(part, "q")), ends, axis=-1)
    sources = {"q": x, "k": read, "v": read}
    return [part.at(f"project.{name}").linear(one, bias_of(part, name)) for name, one in sources.items()]


def dot_product(part: Part, q: Array, k: Array, v: Array, bias: Array, visible: Array) -> Array:
    """Queries [h, q, d], keys and values [g, k, d], bias [h, q, k] -> [q, h, d]. https://arxiv.org/abs/1706.03762."""
    config, y = part.config, []
    scale = q.shape[2] ** -0.5 if config.scale is None else config.scale
    sinks = part.weight("core.softmax.sinks") if config.sinks else np.full(len(q), -np.inf)
    for head, sink in enumerate(sinks):
        shared = head // (len(q) // len(k))
        scores = scale * q[head] @ k[shared].T
        if config.softcap is not None:  # https://arxiv.org/abs/2408.00118
            scores = config.softcap * np.tanh(scores / config.softcap)
        y.append(softmax(scores + bias[head], visible, sink) @ v[shared])
    return np.stack(y, axis=1)


def softmax(scores: Array, visible: Array, sink: float = -np.inf) -> Array:
    """Weights [q, k] of the visible keys, zeros if there is none; a sink is one more score, as in arXiv:2309.17453."""
    weights = np.zeros_like(scores)
    for query, seen in enumerate(visible):
        if seen.any():
            top = max(scores[query, seen].max(), sink)
            weights[query, seen] = np.exp(scores[query, seen] - top)
            weights[query] /= weights[query].sum() + np.exp(sink - top)
    return weights


ATTENTIONS: dict[str, Function] = {
    "mha": lambda part, x, scope: multi_head(part, x, scope, part.config.n_heads),
    "gqa": lambda part, x, scope: multi_head(
        part, x, scope, part.config.n_kv_heads
    ),  # https://arxiv.org/abs/2305.13245
    "mqa": lambda part, x, scope: multi_head(part, x, scope, 1),  # https://arxiv.org/abs/1911.02150
}
"""x [t, d_model], a Scope -> [t, d_model]."""

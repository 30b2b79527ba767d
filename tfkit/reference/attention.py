"""Attention: project, clip, norms, rotate, temperature, scores, softmax, values, gate, norm, project.

t positions, q queries, k keys, h query heads, g key-value heads, d width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfkit.component import AttentionConfig, RotaryConfig, ScoreBiasConfig
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
    q, k, v = _project(part, x, scope.read, config.n_heads * d, g * d)
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
    if config.temperature is not None and scope.positions is not None:
        q = q * _temperature(part, scope.positions)[:, None]
    bias = np.zeros((len(q), 1, 1))
    if position is not None and isinstance(position.config, ScoreBiasConfig):
        bias = position(config, scope.positions, scope.positions, scope.causal)
    y = (core or dot_product)(part, q, k, v, bias, scope.visible)
    if config.gate is not None:
        y = y * _gate(part, x)
    y = part.optional("inner_norm", config.inner_norm, y.reshape(len(y), -1))
    return part.at("output").linear(y, bias_of(part, "o"))


def _project(part: Part, x: Array, read: Array, q_width: int, kv_width: int) -> list[Array]:
    """Queries of x, keys and values of what it reads; one matrix may hold all three, in this order."""
    if part.at("project.qkv").path + ".weight" in part.model.weights:
        return np.split(part.at("project.qkv").linear(x, bias_of(part, "q")), [q_width, q_width + kv_width], axis=-1)
    sources = {"q": x, "k": read, "v": read}
    return [part.at(f"project.{name}").linear(one, bias_of(part, name)) for name, one in sources.items()]


def _temperature(part: Part, positions: Array) -> Array:
    """1 + beta ln(1 + floor((position + offset) / original_max_len)). https://arxiv.org/abs/2501.19399."""
    config = part.config.temperature
    return 1 + np.log1p((positions + config.offset) // config.original_max_len) * config.beta


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
    """Weights of the visible keys; the sink is one more score. https://arxiv.org/abs/2309.17453.

    A query that sees no key has zeros.
    """
    weights = np.zeros_like(scores)
    for query in np.flatnonzero(visible.any(1)):
        seen = scores[query, visible[query]]
        top = max(seen.max(), sink)
        weights[query, visible[query]] = np.exp(seen - top) / (np.exp(seen - top).sum() + np.exp(sink - top))
    return weights


def _gate(part: Part, x: Array) -> Array:
    """A factor of each channel or head, from the input, [t, h, d or 1]. https://arxiv.org/abs/2505.06708."""
    gate, config = part.at("gate"), part.config.gate
    y: Array = gate.at("activation", config.activation)(gate.at("linear").linear(x, bias=False))
    return y.reshape(len(x), part.config.n_heads, -1)


def own_scope(
    config: AttentionConfig, x: Array, real: Array, causal: bool, prefix: int, position: Part | None
) -> Scope:
    """The scope of self-attention: its window (https://arxiv.org/abs/2004.05150) and the prefix, without padding.

    `causal` counts where the attention has no mask. Every query reads the first `prefix` tokens
    (https://arxiv.org/abs/1910.10683, section 3.2.1).
    """
    positions = count(real)
    left, right = (None, 0 if causal else None) if config.mask is None else (config.mask.left, config.mask.right)
    ahead = positions - positions[:, None]
    visible = (ahead >= (-np.inf if left is None else -left)) & (ahead <= (np.inf if right is None else right))
    return Scope(x, (visible | (positions < prefix)) & real, positions, right == 0, position)


def count(real: Array) -> Array:
    """The position of each token: padding takes none, and in a mask of pairs, tokens that it may not read take none."""
    return np.maximum((np.cumsum(real) if real.ndim == 1 else np.tril(real).sum(1)) - 1, 0)


ATTENTIONS: dict[str, Function] = {
    "mha": lambda part, x, scope: multi_head(part, x, scope, part.config.n_heads),
    "gqa": lambda part, x, scope: multi_head(
        part, x, scope, part.config.n_kv_heads
    ),  # https://arxiv.org/abs/2305.13245
    "mqa": lambda part, x, scope: multi_head(part, x, scope, 1),  # https://arxiv.org/abs/1911.02150
}

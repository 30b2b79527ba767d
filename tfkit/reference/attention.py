"""Attention: project, clip, norms, rotate, temperature, scores, softmax, values, gate, norm, project.

t positions, q queries, k keys, h query heads, g key-value heads, d width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tfkit.component import ContentScoreConfig, RotaryConfig, ScoreBiasConfig
from tfkit.reference.model import Array, Function, Part
from tfkit.reference.pointwise import bias_of


@dataclass(frozen=True)
class Scope:
    """The keys to which an attention may attend, and their positions."""

    visible: Array
    """[q, k], True where a query may attend to a key."""
    memory: Array | None = None
    """[k, width], the input of keys and values; None for the sequence itself."""
    positions: Array | None = None
    """[t], counted without padding; None in cross-attention, which has none."""
    causal: bool = False
    """True if no query attends to a later key, except within a prefix or a block."""
    prefix: bool = False
    """True if queries attend to later keys within a prefix or a block."""
    position: Part | None = None
    """The component in the slot `position`, with its weights."""
    wires: dict[str, Array] = field(default_factory=dict)
    """The tensors from earlier sublayers, by name. A sublayer adds the tensors that it gives to later sublayers."""


def multi_head(part: Part, x: Array, scope: Scope, g: int, core: Function | None = None) -> Array:
    """Compute multi-head attention with g heads of keys and values; a kind may replace the core `dot_product`."""
    config, position = part.config, scope.position
    q, *kv = [_heads(part, name, y, scope) for name, y in zip("qkv", _projected(part, x, scope, g), strict=False)]
    if config.kv_from is not None:  # https://arxiv.org/abs/2405.12981
        kv = [scope.wires[f"{config.kv_from}.{name}"] for name in ("keys", "values")]
    if config.kv_name is not None:
        scope.wires.update(zip((f"{config.kv_name}.keys", f"{config.kv_name}.values"), kv, strict=True))
    k, v = kv
    if config.temperature is not None and scope.positions is not None:  # https://arxiv.org/abs/2501.19399
        times = (scope.positions + config.temperature.offset) // config.temperature.original_max_len
        q = q * (1 + config.temperature.beta * np.log1p(times))[:, None]
    bias = np.zeros((len(q), 1, 1))
    if position is not None and isinstance(position.config, ScoreBiasConfig):
        bias = position(config, scope.positions, scope.causal)
    if position is not None and isinstance(position.config, ContentScoreConfig):
        content = replace(position, trace=[])  # the module of this path returns rows and indices
        causal = scope.causal and not scope.prefix
        project = partial(_projected, part, scope=Scope(scope.visible), g=g)
        bias = content(part, q, k, scope.positions, causal, project)
        if config.scale is None:  # a score is a sum of products: https://arxiv.org/abs/2006.03654, section 3.1
            q = q * (1 + position.config.n_terms) ** -0.5
    y = (core or dot_product)(part, q, k, v, bias, scope.visible)
    if config.gate is not None:  # a factor of each channel or head: https://arxiv.org/abs/2505.06708
        gate = part.at("gate.activation", config.gate.activation)(part.at("gate.linear").linear(x, False))
        y = y * gate.reshape(len(x), config.n_heads, -1)
    y = part.at("inner_norm", config.inner_norm)(y.reshape(len(y), -1))
    return part.at("output").linear(y, bias_of(part, "o"))


def _projected(part: Part, x: Array, scope: Scope, g: int) -> list[Array]:
    """Return queries of x, and keys and values of its source; one matrix may hold all three."""
    layer, h = part.at("project.qkv"), part.config.n_heads
    heads = {"q": h} if part.config.kv_from is not None else {"q": h, "k": g, "v": g}
    if part.config.values is not None:
        del heads["v"]
    if f"{layer.path}.weight" in part.weights:
        y = layer.linear(x, bias_of(part, "q"))
        projected = [*layer.split(y, {name: n * (y.shape[1] // sum(heads.values())) for name, n in heads.items()})]
    else:
        read = x if scope.memory is None else scope.memory
        projected = [
            part.at(f"project.{name}").linear(x if name == "q" else read, bias_of(part, name)) for name in heads
        ]
    return projected if part.config.values is None else [*projected, projected[1]]


def _heads(part: Part, name: str, y: Array, scope: Scope) -> Array:
    """Return heads [h, t, d] of y [t, h d] after clip, norm, per-head norm, rotation, norm; values are not rotated."""
    config, clip = part.config, part.config.clip or np.inf
    norms = (config.qk_norm_full, config.qk_norm, config.qk_norm_rotated)
    full, of_each, rotated = norms if name != "v" else (None, config.value_norm, None)
    y = part.at(f"project.{name}_norm", full)(np.clip(y, -clip, clip))
    y = part.at(f"{name}_norm", of_each)(y.reshape(len(y), -1, config.d_head or config.d_model // config.n_heads))
    if name != "v" and scope.position is not None and isinstance(scope.position.config, RotaryConfig):
        y = scope.position(y, scope.positions, scope.visible.shape[1])
    return part.at(f"{name}_norm_rotated", rotated)(y).swapaxes(0, 1)


def dot_product(part: Part, q: Array, k: Array, v: Array, bias: Array, visible: Array) -> Array:
    """Attend: queries [h, q, d], keys and values [g, k, d], bias [h, q, k] -> [q, h, d]. arXiv:1706.03762."""
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
    """Return weights [q, k] of the visible keys, zeros without any; a sink adds a score, as in arXiv:2309.17453."""
    weights = np.zeros_like(scores)
    for query, seen in enumerate(visible):
        if seen.any():
            top = max(scores[query, seen].max(), sink)
            weights[query, seen] = np.exp(scores[query, seen] - top)
            weights[query] /= weights[query].sum() + np.exp(sink - top)
    return weights


ATTENTIONS: dict[str, Function] = {
    "mha": lambda part, x, scope: multi_head(part, x, scope, part.config.n_heads),
    # https://arxiv.org/abs/2305.13245
    "gqa": lambda part, x, scope: multi_head(part, x, scope, part.config.n_kv_heads),
    # https://arxiv.org/abs/1911.02150
    "mqa": lambda part, x, scope: multi_head(part, x, scope, 1),
}

"""Definitions of the attentions in NumPy, independent of their modules: functions for `tfkit.reference`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import tfkit
from tfkit.reference import Part, Scope, multi_head, softmax


def mla(part: Part, x: Any, scope: Scope) -> Any:
    """Compute keys and values of all heads from one latent per token. https://arxiv.org/abs/2405.04434, section 2.1."""
    config, h, n = part.config, part.config.n_heads, part.config.d_nope
    source, position = x if scope.memory is None else scope.memory, scope.position
    q = part.at("q").linear(x, False) if config.q_rank is None else part.at("q_up").linear(query_latent(part, x), False)
    q = q.reshape(len(x), h, -1)
    if config.temperature is not None and scope.positions is not None:  # https://arxiv.org/abs/2501.19399
        times = (scope.positions + config.temperature.offset) // config.temperature.original_max_len
        q = q * (1 + config.temperature.beta * np.log1p(times))[:, None, None]
    down = part.at("kv_down")
    latent, k_rope = down.split(down.linear(source, config.bias), {"latent": config.kv_rank, "rope": config.d_rope})
    latent = part.at("kv_norm", config.latent_norm)(latent) * config.kv_scale
    kv = part.at("kv_up").linear(latent, False).reshape(len(source), h, -1)
    q_nope, q_rope, bias = q[..., :n], q[..., n:], np.zeros((h, 1, 1))
    if position is not None and isinstance(position.config, tfkit.RotaryConfig):
        n_keys = scope.visible.shape[1]
        q_rope = position(q_rope, scope.positions, n_keys)
        k_rope = position(k_rope[:, None], scope.positions, n_keys)[:, 0]
    if position is not None and isinstance(position.config, tfkit.ScoreBiasConfig):
        bias = position(config, scope.positions, scope.causal)
    scores = scale_of(config) * (
        np.einsum("qhd,khd->hqk", q_nope, kv[..., :n]) + np.einsum("qhd,kd->hqk", q_rope, k_rope)
    )
    y = np.stack([softmax(scores[head] + bias[head], scope.visible) @ kv[:, head, n:] for head in range(h)], axis=1)
    if config.gate is not None:  # a factor of each channel or head: https://arxiv.org/abs/2505.06708
        factor = part.at("gate.activation", config.gate.activation)(part.at("gate.linear").linear(x, False))
        y = y * factor.reshape(len(x), h, -1)
    return part.at("output").linear(y.reshape(len(x), -1), config.bias)


def query_latent(part: Part, x: Any) -> Any:
    """Return the normed latent of the queries, [t, q_rank]."""
    return part.at("q_norm", part.config.latent_norm)(part.at("q_down").linear(x, part.config.bias))


def scale_of(config: Any) -> float:
    """Return the factor of the scores. YaRN scales only the rotated channels, so this factor scales all channels up."""
    if config.scale is not None:
        return float(config.scale)
    fields = {} if config.position is None else dict(dict(config.position).get("scaling") or {})
    growth = 1 + 0.1 * (fields.get("mscale_all_dim") or 0) * math.log(max(fields.get("factor") or 1, 1))
    return float(growth**2 / math.sqrt(config.d_nope + config.d_rope))


def mla_indexed(part: Part, x: Any, scope: Scope) -> Any:
    """Attend to the visible keys with the best scores of the index. https://arxiv.org/abs/2512.02556, section 2."""
    config, index, index_part = part.config, part.config.index, part.at("index")
    if index is None:  # https://arxiv.org/abs/2603.12201
        return mla(part, x, replace(scope, visible=scope.wires[config.index_from]))
    q = index_part.at("q").linear(query_latent(part, x), False).reshape(len(x), index.n_heads, -1)
    k = index_part.at("k_norm", index.norm)(index_part.at("k").linear(x, False))[:, None]
    if scope.position is not None and scope.position.config is not None:
        style = scope.position.config.model_copy(update={"style": index.style})
        turn = replace(scope.position, config=style, trace=[])
        q, k = (_turned(turn, y, config.d_rope, scope) for y in (q, k))
    products = np.maximum(np.einsum("qhd,kd->qhk", q, k[:, 0]), 0) / math.sqrt(index.n_heads * index.d_head)
    scores = np.einsum("qhk,qh->qk", products, index_part.at("weight").linear(x, False))
    visible = np.zeros_like(scope.visible)
    for query, keys in enumerate(scope.visible):
        best = sorted(np.flatnonzero(keys), key=(-scores[query]).__getitem__)[: index.keep]
        visible[query, best] = True
    if config.index_name is not None:
        scope.wires[config.index_name] = visible
    return mla(part, x, replace(scope, visible=visible))


def _turned(turn: Callable[..., Any], y: Any, width: int, scope: Scope) -> Any:
    turned = turn(y[..., :width], scope.positions, scope.visible.shape[1])
    return np.concatenate([turned, y[..., width:]], axis=-1)


def differential(part: Part, x: Any, scope: Scope) -> Any:
    """Compute multi-head attention with differences of heads. https://arxiv.org/abs/2410.05258, section 2.1."""
    return multi_head(part, x, scope, part.config.n_kv_heads, core=_differences)


def _differences(part: Part, q: Any, k: Any, v: Any, bias: Any, visible: Any) -> Any:
    """Attend in pairs of heads: queries [h, q, d], keys and values [g, k, d], bias [h, q, k] -> [q, h, d]."""
    config, n, n_values = part.config, len(q) // 2, len(k) // 2
    layer = re.search(r"\.layers\.(\d+)\.", part.path)
    start = config.lambda_init
    if start is None:
        start = 0.8 - 0.6 * math.exp(-0.3 * (int(layer[1]) if layer else 0))
    q1, k1, q2, k2 = (part.weight(f"core.lambda_{name}") for name in ("q1", "k1", "q2", "k2"))
    factor = math.exp(q1 @ k1) - math.exp(q2 @ k2) + start
    scale, differences = q.shape[2] ** -0.5 if config.scale is None else config.scale, []
    for pair in range(n):
        group = pair // (n // n_values)
        weights = []
        for head, keys in ((pair, k[group]), (n + pair, k[n_values + group])):
            scores = scale * q[head] @ keys.T
            if config.softcap is not None:  # https://arxiv.org/abs/2408.00118
                scores = config.softcap * np.tanh(scores / config.softcap)
            weights.append(softmax(scores + bias[head], visible))
        values = np.concatenate((v[group], v[n_values + group]), axis=1)
        differences.append((weights[0] - factor * weights[1]) @ values)
    y = (1 - start) * part.at("core.head_norm", config.head_norm)(np.stack(differences, axis=1))
    return y.reshape(len(y), 2 * n, -1)

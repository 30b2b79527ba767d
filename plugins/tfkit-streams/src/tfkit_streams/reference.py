"""The kinds once more, in NumPy and without a line of their modules: functions for `tfkit.reference`."""

from __future__ import annotations

from typing import Any

import numpy as np

import tfkit
from tfkit.reference import Part, Scope
from tfkit.reference import softmax as attention_weights


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def silu(x: Any) -> Any:
    """Return x times its sigmoid."""
    return x * sigmoid(x)


def softmax(x: Any) -> Any:
    """Return the softmax over the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def rms(x: Any, eps: float) -> Any:
    """Divide by the root mean square of the last axis."""
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def manifold(part: Part, place: str, stream: Any, *further: Any) -> Any:
    """Compute a module of the streams, [t, n, m], one token after the other."""
    config = part.config
    n = config.streams
    if place == "enter":
        return np.stack([stream] * n, axis=1)
    if place == "write":
        y, (post, comb) = further
        # Stream k gets what every stream i hands to it, comb[i, k].
        return np.array([[post[t, k] * y[t] + comb[t, :, k] @ stream[t] for k in range(n)] for t in range(len(y))])
    names = ["pre"] if place == "leave" else ["pre", "post", "comb"]
    logits = rms(stream.reshape(len(stream), -1), config.norm_eps) @ part.weight("project.weight").T
    scale, base, ends = part.weight("scale"), part.weight("base"), np.cumsum([n, n, n * n])
    logits = np.split(logits, ends[: len(names) - 1], axis=1)
    base = np.split(base, ends[: len(names) - 1])
    pre, *further = [x * s + b for x, s, b in zip(logits, scale, base, strict=True)]
    x = np.einsum("tn,tnm->tm", sigmoid(pre) + config.eps, stream)
    if place == "leave":
        return x
    post, comb = further
    comb = softmax(comb.reshape(-1, n, n)) + config.eps
    for number in range(2 * config.iterations - 1):
        comb = comb / (comb.sum(axis=2 if number % 2 else 1, keepdims=True) + config.eps)
    return x, (2 * sigmoid(post), comb)


def independent(part: Part, place: str, stream: Any, *further: Any) -> Any:
    """Compute a module of the streams, [t, n, m]."""
    config = part.config
    if place == "enter":
        return np.stack([stream] * config.streams, axis=1)
    if place == "write":
        y, post = further
        return stream + np.einsum("tn,tm->tnm", post, y)
    logits = rms(stream.reshape(len(stream), -1), config.norm_eps) @ part.weight("project.weight").T
    weights = sigmoid(logits * np.repeat(part.weight("scale"), config.streams) + part.weight("base"))
    x = np.einsum("tn,tnm->tm", weights[:, : config.streams] + config.eps, stream)
    return x if place == "leave" else (x, config.magnitude * weights[:, config.streams :] + config.eps)


def gated(part: Part, place: str, stream: Any, *further: Any) -> Any:
    """Compute a module of the streams, [t, n, m]."""
    config = part.config
    if place == "enter":
        return np.stack([stream] * config.streams, axis=1)
    if place == "write":
        y, weights = further
        return stream + np.einsum("tn,tm->tnm", weights, y)
    normed = rms(stream, config.eps) * (1 + part.weight())
    flat = normed.reshape(len(stream), -1)
    gate = sigmoid(silu(flat @ part.weight("down.weight").T / config.streams) @ part.weight("up.weight").T)
    x = (gate.reshape(normed.shape) * normed).mean(axis=1)
    if place == "leave":
        return x
    return x, 2 * sigmoid(flat @ part.weight("inject.weight").T / config.streams)


def depth(part: Part, place: str, stream: Any, *further: Any) -> Any:
    """Compute a module; the stream is the next input and the outputs so far."""
    if place == "enter":
        return stream, [stream]
    if place == "leave":
        return stream[0]
    if place == "read":
        return stream[0], None
    outputs = [*stream[1], further[0]]
    scores = np.stack([rms(output, part.config.eps) @ part.weight("query") for output in outputs], axis=1)
    return np.einsum("tk,ktm->tm", softmax(scores), np.array(outputs)), outputs


def modulated(part: Part, place: str, stream: Any, *further: Any) -> Any:
    """Compute an addition with a gate that depends on the condition."""
    if place == "read":
        return stream, part.weight("gate.weight") @ silu(further[0]) + part.weight("gate.bias")
    y, gate = further
    return stream + gate * y


def adaptive(part: Part, x: Any, condition: Any) -> Any:
    """Compute a layernorm whose scale and shift depend on the condition."""
    shift, scale = np.split(part.weight("modulation.weight") @ silu(condition) + part.weight("modulation.bias"), 2)
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + part.config.eps) * (1 + scale) + shift


def scaled_sum(part: Part, place: str, stream: Any, *further: Any) -> Any:
    """Compute a module of the stream, [t, m]."""
    return (stream, []) if place == "read" else (stream + further[0]) * part.weight("scale")


def feature_gate(part: Part, x: Any, features: Any) -> Any:
    """Gate the features of a layer, [t, c], by x, [t, m]."""
    gate = part.at("activation", part.config.activation)(part.at("gate").linear(x, bias=False))
    return part.at("up").linear(gate * features, bias=False)


def value_residual(part: Part, x: Any, scope: Scope) -> Any:
    """Attend to values that are a mix with the values of the first layer. https://arxiv.org/abs/2410.17897."""
    config, h, position = part.config, part.config.n_heads, scope.position
    q, k, v = (y.reshape(len(x), h, -1) for y in np.split(part.at("qkv").linear(x, config.bias), 3, axis=1))
    q, k = part.at("q_norm", config.qk_norm)(q), part.at("k_norm", config.qk_norm)(k)
    bias = np.zeros((h, 1, 1))
    if position is not None and isinstance(position.config, tfkit.RotaryConfig):
        q, k = (position(y, scope.positions, scope.visible.shape[1]) for y in (q, k))
    if position is not None and isinstance(position.config, tfkit.ScoreBiasConfig):
        bias = position(config, scope.positions, scope.causal)
    if config.first:
        scope.wires["values"] = v
    else:
        first, other = part.weight("mix")
        v = first * scope.wires["values"] + other * v
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[2]) + bias
    y = [attention_weights(scores[head], scope.visible) @ v[:, head] for head in range(h)]
    return part.at("output").linear(np.concatenate(y, axis=1), config.bias)


KINDS = {
    "residual": {
        "manifold": manifold,
        "independent": independent,
        "gated": gated,
        "depth": depth,
        "modulated": modulated,
        "scaled_sum": scaled_sum,
    },
    "norm": {"adaptive": adaptive},
    "mixer": {"feature_gate": feature_gate},
    "attention": {"value_residual": value_residual},
}

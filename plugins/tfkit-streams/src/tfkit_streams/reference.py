"""Definitions of the kinds in NumPy, independent of their modules: functions for `tfkit.reference`."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
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


def manifold(part: Part, step: str, stream: Any, *further: Any) -> Any:
    """Compute a module of the streams, [t, n, m], one token after the other."""
    config = part.config
    n = config.streams
    if step == "enter":
        return np.stack([stream] * n, axis=1)
    if step == "write":
        y, (post, comb) = further
        # Stream k receives stream i with the weight comb[i, k].
        return np.array([[post[t, k] * y[t] + comb[t, :, k] @ stream[t] for k in range(n)] for t in range(len(y))])
    names = ["pre"] if step == "leave" else ["pre", "post", "comb"]
    logits = rms(stream.reshape(len(stream), -1), config.norm_eps) @ part.weight("project.weight").T
    scale, base, ends = part.weight("scale"), part.weight("base"), np.cumsum([n, n, n * n])
    columns, offsets = np.split(logits, ends[: len(names) - 1], axis=1), np.split(base, ends[: len(names) - 1])
    pre, *rest = [x * s + b for x, s, b in zip(columns, scale, offsets, strict=True)]
    x = np.einsum("tn,tnm->tm", sigmoid(pre) + config.eps, stream)
    if step == "leave":
        return x
    post, comb = rest
    comb = softmax(comb.reshape(-1, n, n)) + config.eps
    for number in range(2 * config.iterations - 1):
        comb = comb / (comb.sum(axis=2 if number % 2 else 1, keepdims=True) + config.eps)
    return x, (2 * sigmoid(post), comb)


def independent(part: Part, step: str, stream: Any, *further: Any) -> Any:
    """Compute a module of the streams, [t, n, m]."""
    config = part.config
    if step == "enter":
        return np.stack([stream] * config.streams, axis=1)
    if step == "write":
        y, post = further
        return stream + np.einsum("tn,tm->tnm", post, y)
    logits = rms(stream.reshape(len(stream), -1), config.norm_eps) @ part.weight("project.weight").T
    weights = sigmoid(logits * np.repeat(part.weight("scale"), config.streams) + part.weight("base"))
    x = np.einsum("tn,tnm->tm", weights[:, : config.streams] + config.eps, stream)
    return x if step == "leave" else (x, config.magnitude * weights[:, config.streams :] + config.eps)


def gated(part: Part, step: str, stream: Any, *further: Any) -> Any:
    """Compute a module of the streams, [t, n, m]."""
    config = part.config
    if step == "enter":
        return np.stack([stream] * config.streams, axis=1)
    if step == "write":
        y, weights = further
        return stream + np.einsum("tn,tm->tnm", weights, y)
    normed = rms(stream, config.eps) * (1 + part.weight())
    flat = normed.reshape(len(stream), -1)
    gate = sigmoid(silu(flat @ part.weight("down.weight").T / config.streams) @ part.weight("up.weight").T)
    x = (gate.reshape(normed.shape) * normed).mean(axis=1)
    if step == "leave":
        return x
    return x, 2 * sigmoid(flat @ part.weight("inject.weight").T / config.streams)


def depth(part: Part, step: str, stream: Any, *further: Any) -> Any:
    """Compute a module; the stream is the next input and the outputs so far."""
    if step == "enter":
        return stream, [stream]
    if step == "leave":
        return stream[0]
    if step == "read":
        return stream[0], None
    outputs = [*stream[1], further[0]]
    scores = np.stack([rms(output, part.config.eps) @ part.weight("query") for output in outputs], axis=1)
    return np.einsum("tk,ktm->tm", softmax(scores), np.array(outputs)), outputs


def modulated(part: Part, step: str, stream: Any, *further: Any) -> Any:
    """Compute an addition with a gate that depends on the condition."""
    if step == "read":
        return stream, part.weight("gate.weight") @ silu(further[0]) + part.weight("gate.bias")
    y, gate = further
    return stream + gate * y


def adaptive(part: Part, x: Any, condition: Any) -> Any:
    """Compute a layernorm whose scale and shift depend on the condition."""
    shift, scale = np.split(part.weight("modulation.weight") @ silu(condition) + part.weight("modulation.bias"), 2)
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + part.config.eps) * (1 + scale) + shift


def scaled_sum(part: Part, step: str, stream: Any, *further: Any) -> Any:
    """Compute a module of the stream, [t, m]."""
    return (stream, []) if step == "read" else (stream + further[0]) * part.weight("scale")


def layer_inputs(part: Part, *, inputs: Any) -> Any:
    """Compute the features of all layers from two sequences."""
    x, table = inputs
    projected = part.at("project").linear(x.x, bias=False) * x.x.shape[-1] ** -0.5
    parts = projected.reshape(len(projected), -1, part.config.d_features)
    normed = part.at("norm", part.config.norm)(parts).reshape(projected.shape)
    return table._replace(x=(normed + table.x) / np.sqrt(2))


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


def altup(part: Part, step: str, stream: Any, *further: Any) -> Any:
    """Compute a module of the streams, [t, n, m]: predictions before a layer, and their correction after it."""
    config = part.config
    if step in ("enter", "leave"):
        first = stream if step == "enter" else stream[:, 0]
        projections = [part.at(f"projections.{i}") for i in range(config.streams - 1)]
        inputs = [stream if step == "enter" else stream[:, i + 1] for i in range(len(projections))]
        size = np.sqrt((first**2).mean(axis=-1, keepdims=True))
        projected = [matrix.linear(x, bias=False) for matrix, x in zip(projections, inputs, strict=True)]
        scaled = [y * size / np.sqrt(np.maximum((y**2).mean(axis=-1, keepdims=True), 1e-5)) for y in projected]
        return np.stack([first, *scaled], axis=1) if step == "enter" else np.mean([first, *scaled], axis=0)
    if step == "read":
        _, features = further
        scale, router = part.weight("scale"), part.weight("router.weight")
        logits = np.tanh(rms(stream[:, 0], config.eps) * scale / stream.shape[-1] @ router.T)
        matrix = (logits @ part.weight("predict.weight").T).reshape(-1, config.streams, config.streams)
        predictions = np.einsum("tkl,tlm->tkm", matrix, stream) + stream
        return predictions[:, 0], (predictions, features, scale, router)
    y, (predictions, features, scale, router) = further
    logits = np.tanh(rms(y, config.eps) * scale / y.shape[-1] @ router.T)
    factors = 1 + logits @ part.weight("correct.weight").T
    corrected = predictions + factors[..., None] * (y - predictions[:, 0])[:, None]
    gate = part.at("gate").linear(corrected[:, 0] * part.weight("scale"), bias=False)
    gated = part.at("activation", config.activation)(gate) * features
    corrected[:, 1:] += part.at("norm", config.norm)(part.at("up").linear(gated, bias=False))[:, None]
    return corrected


def laurel(part: Part, step: str, stream: Any, *further: Any) -> Any:
    """Compute a module of the stream, [t, m]."""
    if step == "write":
        y, (added,) = further
        return (stream + y + added) / np.sqrt(2)
    normed = part.at("norm_in", part.config.norm)(stream)
    low = part.at("right").linear(part.at("left").linear(normed, bias=False), bias=False)
    return normed, (normed + part.at("norm_out", part.config.norm)(low),)


def sparse_glu(part: Part, x: Any) -> Any:
    """Compute an FFN. In sparse layers, only the excess of a gate over a quantile remains."""
    config, layer = part.config, int(part.path.partition("layers.")[2].partition(".")[0])
    gate, up = np.split(part.at("gate_up").linear(x, config.bias), 2, axis=-1)
    sparsity = config.sparsity[layer] if layer < len(config.sparsity) else 0
    if sparsity:
        cutoff = gate.mean(axis=-1, keepdims=True) + NormalDist().inv_cdf(sparsity) * gate.std(axis=-1, keepdims=True)
        gate = np.maximum(gate - cutoff, 0)
    return part.at("down").linear(part.at("activation", config.activation)(gate) * up, config.bias)


KINDS: dict[str, dict[str, Callable[..., Any]]] = {
    "residual": {
        "manifold": manifold,
        "independent": independent,
        "gated": gated,
        "depth": depth,
        "modulated": modulated,
        "scaled_sum": scaled_sum,
        "altup": altup,
        "laurel": laurel,
    },
    "norm": {"adaptive": adaptive},
    "block": {"layer_inputs": layer_inputs},
    "ffn": {"sparse_glu": sparse_glu},
    "mixer": {"feature_gate": feature_gate},
    "attention": {"value_residual": value_residual},
}

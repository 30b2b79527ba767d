"""Definitions of the kinds in NumPy, independent of their modules: functions for `tfkit.reference`.

t positions, h heads, d width of a head, n conv_size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tfkit
from tfkit.reference import Part, Scope, softmax


def fourier(part: Part, x: Any) -> Any:
    """Compute the real part of the Fourier transform over tokens and channels. https://arxiv.org/abs/2105.03824."""
    tokens, channels = (np.exp(-2j * np.pi * np.outer(range(size), range(size)) / size) for size in x.shape)
    return (tokens @ x @ channels).real


def mixed_conv(part: Part, x: Any, scope: Scope) -> Any:
    """Compute heads of attention, and heads of a dynamic convolution. https://arxiv.org/abs/2008.02496, section 3."""
    config, project, length = part.config, part.at("project"), len(x)
    h, d, bias = config.n_heads, config.d_head or config.d_model // (2 * config.n_heads), config.bias
    parts = project.split(project.linear(x, bias), dict.fromkeys(("q", "k", "v", "conv"), h * d))
    q, k, v, values = (y.reshape(length, h, d) for y in parts)
    attended = attention(config, q, k, v, scope)

    near = neighbors(scope.visible, config.conv_size)
    depthwise = np.tile(part.weight("depthwise").swapaxes(0, 1), (length, 1, 1))  # [t, m, n]
    spans = part.at("pointwise").linear(weighted(x, depthwise, near), bias).reshape(length, h, d)
    kernels = part.at("kernels").linear((q * spans).reshape(length, -1), bias).reshape(length, h, -1)
    kernels = np.exp(kernels - kernels.max(axis=2, keepdims=True))
    convolved = weighted(values, (kernels / kernels.sum(axis=2, keepdims=True))[:, :, None], near)
    y = np.concatenate((attended.reshape(length, -1), convolved.reshape(length, -1)), axis=1)
    return part.at("output").linear(y, bias)


def attention(config: Any, q: Any, k: Any, v: Any, scope: Scope) -> Any:
    """Compute scaled dot-product attention, [t, h, d] each -> [t, h, d]. https://arxiv.org/abs/1706.03762."""
    position, bias = scope.position, np.zeros((config.n_heads, 1, 1))
    if position is not None and isinstance(position.config, tfkit.RotaryConfig):
        q, k = (position(y, scope.positions, len(q)) for y in (q, k))
    if position is not None and isinstance(position.config, tfkit.ScoreBiasConfig):
        bias = position(config, scope.positions, scope.causal)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[2])
    return np.stack([softmax(scores[i] + bias[i], scope.visible) @ v[:, i] for i in range(len(scores))], axis=1)


def neighbors(visible: Any, size: int) -> Any:
    """Return the indices of the tokens around each token, [t, n], among those that it may attend to; -1 for none."""
    near = np.full((len(visible), size), -1)
    for t, row in enumerate(visible):
        tokens = np.flatnonzero(row).tolist()
        for tap in range(size) if t in tokens else ():
            neighbor = tokens.index(t) + tap - size // 2
            if 0 <= neighbor < len(tokens):
                near[t, tap] = tokens[neighbor]
    return near


def weighted(x: Any, weights: Any, near: Any) -> Any:
    """Sum the neighbors [t, n] of each token of x [t, ...], times their weights [t, ..., n]."""
    y = np.zeros_like(x)
    for t, tap in np.argwhere(near >= 0):
        y[t] += weights[t, ..., tap] * x[near[t, tap]]
    return y


def grouped_mlp(part: Part, x: Any) -> Any:
    """Compute down(activation(up(x))), each group of channels alone. https://arxiv.org/abs/2008.02496, section 3.4."""
    hidden = part.at("activation", part.config.activation)(grouped(part, "up", x))
    return grouped(part, "down", hidden)


def grouped(part: Part, name: str, x: Any) -> Any:
    """Compute a linear layer of groups of channels; a single group is a plain layer."""
    groups, bias = part.config.groups, part.config.bias
    if groups == 1:
        return part.at(name).linear(x, bias)
    layer = part.at(f"grouped_{name}")
    outputs = [y @ weight.T for y, weight in zip(np.split(x, groups, axis=1), layer.weight(), strict=True)]
    return np.concatenate(outputs, axis=1) + (layer.weight("bias").reshape(-1) if bias else 0)


KINDS: dict[str, dict[str, Callable[..., Any]]] = {
    "attention": {"mixed_conv": mixed_conv},
    "ffn": {"grouped_mlp": grouped_mlp},
    "mixer": {"fourier": fourier},
}

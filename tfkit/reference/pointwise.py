"""Components that act on each position by itself: activations, norms, feed-forward networks."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from tfkit.reference.model import Array, Function, Part

# ---- activations: x -> the same shape ----


def sigmoid(part: Part, x: Array) -> Array:
    """1 / (1 + exp(-x)), in a form that does not overflow."""
    return (1 + np.tanh(x / 2)) / 2


def gelu(part: Part, x: Array) -> Array:
    """Return x times the normal distribution function of x, or the approximation. https://arxiv.org/abs/1606.08415."""
    if part.config.approximate == "tanh":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))


def xielu(part: Part, x: Array) -> Array:
    """Return x / 2 + a x^2 above 0, and x / 2 + b (exp(x) - 1 - x) below. https://arxiv.org/abs/2411.13010."""
    a, b = np.logaddexp(0, part.weight("alpha_p")), 0.5 + np.logaddexp(0, part.weight("alpha_n"))
    return x / 2 + np.where(x > 0, a * x**2, b * (np.expm1(np.minimum(x, 0)) - x))


ACTIVATIONS: dict[str, Function] = {
    "relu": lambda part, x: np.maximum(x, 0),
    "gelu": gelu,
    "silu": lambda part, x: x * sigmoid(part, x),  # https://arxiv.org/abs/1702.03118
    "relu2": lambda part, x: np.maximum(x, 0) ** 2,  # https://arxiv.org/abs/2109.08668
    "quick_gelu": lambda part, x: x * sigmoid(part, 1.702 * x),  # https://arxiv.org/abs/1606.08415
    "tanh": lambda part, x: np.tanh(x),
    "sigmoid": sigmoid,
    "softplus": lambda part, x: np.logaddexp(0, x),  # ln(1 + exp(x))
    "xielu": xielu,
}

# ---- norms: x [..., width] -> the same ----


def rmsnorm(part: Part, x: Array) -> Array:
    """Return x / sqrt(mean of squares + eps) * (offset + weight). https://arxiv.org/abs/1910.07467."""
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + part.config.eps)
    return y * (part.config.offset + _of_heads(part.weight())) if part.config.scale else y


def layernorm(part: Part, x: Array) -> Array:
    """Return (x - mean) / sqrt(variance + eps) * (offset + weight) + bias. https://arxiv.org/abs/1607.06450."""
    y = rmsnorm(part, x - x.mean(-1, keepdims=True))
    return y + _of_heads(part.weight("bias")) if part.config.bias else y


def _of_heads(weight: Array) -> Array:
    """A weight [width], or one of each head [h, width] for x [h, t, width]."""
    return weight if weight.ndim == 1 else weight[:, None]


# ---- feed-forward networks: x [t, d_model] -> the same ----


def any_activation(part: Part, x: Array) -> Array:
    """The activation in the slot of an FFN."""
    return part.optional("activation", part.config.activation, x)


def mlp(part: Part, x: Array, activation: Function = any_activation) -> Array:
    """down(norm(activation(up(x)))). https://arxiv.org/abs/1706.03762."""
    return _down(part, activation(part, part.at("up").linear(x, bias_of(part, "up"))))


def glu(part: Part, x: Array, activation: Function = any_activation) -> Array:
    """down(norm(activation(gate(x)) * up(x))); one matrix is gate, then up. https://arxiv.org/abs/2002.05202."""
    gate, up = np.split(part.at("gate_up").linear(x, bias_of(part, "up")), 2, axis=-1)
    return _down(part, activation(part, gate) * up)


def _down(part: Part, hidden: Array) -> Array:
    return part.at("down").linear(part.optional("inner_norm", part.config.inner_norm, hidden), bias_of(part, "down"))


def bias_of(part: Part, name: str) -> bool:
    """True if the linear layer of that name has a bias: all may have one, or some."""
    bias = part.config.bias
    return bias if isinstance(bias, bool) else bool(dict(bias)[name])


NORMS: dict[str, Function] = {"layernorm": layernorm, "rmsnorm": rmsnorm}
FFNS: dict[str, Function] = {
    **{"mlp": mlp, "glu": glu},
    **{name: partial(mlp, activation=ACTIVATIONS[name]) for name in ("relu", "gelu", "silu", "relu2", "quick_gelu")},
    **{f"{name[:-2]}glu": partial(glu, activation=ACTIVATIONS[name]) for name in ("relu", "gelu")},
    "swiglu": partial(glu, activation=ACTIVATIONS["silu"]),
}

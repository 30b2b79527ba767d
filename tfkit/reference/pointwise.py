"""Components that act on each position independently: activations, norms, feed-forward networks."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from tfkit.reference.model import Array, Function, Part

# ---- activations: x -> the same shape ----


def sigmoid(part: Part, x: Array) -> Array:
    """Compute 1 / (1 + exp(-x)) in a form that does not overflow."""
    return (1 + np.tanh(x / 2)) / 2


def gelu(part: Part, x: Array) -> Array:
    """Return x times the normal distribution function of x, or the approximation. https://arxiv.org/abs/1606.08415."""
    if part.config.approximate == "tanh":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))


def xielu(part: Part, x: Array) -> Array:
    """Return x / 2 + a x^2 above 0, and x / 2 + b (exp(x) - 1 - x) below. https://arxiv.org/abs/2411.13010.

    As in the models that were trained with it, the exponent is at most -1e-6.
    """
    a, b = np.logaddexp(0, part.weight("alpha_p")), 0.5 + np.logaddexp(0, part.weight("alpha_n"))
    return x / 2 + np.where(x > 0, a * x**2, b * (np.expm1(np.minimum(x, -1e-6)) - x))


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

# ---- norms: x [..., width] -> the same; of heads, x [t, h, width]; a weight may be [h, width] ----


def rmsnorm(part: Part, x: Array) -> Array:
    """Return x / sqrt(mean of squares + eps) * (offset + weight). https://arxiv.org/abs/1910.07467."""
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + part.config.eps)
    return y * (part.config.offset + part.weight()) if part.config.scale else y


def layernorm(part: Part, x: Array) -> Array:
    """Return (x - mean) / sqrt(variance + eps) * (offset + weight) + bias. https://arxiv.org/abs/1607.06450."""
    y = rmsnorm(part, x - x.mean(-1, keepdims=True))
    return y + part.weight("bias") if part.config.bias else y


NORMS: dict[str, Function] = {"layernorm": layernorm, "rmsnorm": rmsnorm}

# ---- feed-forward networks: x [t, d_model] -> the same ----


def mlp(part: Part, x: Array, activation: Function | None = None, *, gated: bool = False) -> Array:
    """Compute down(norm(activation(up(x)))); if gated, activation(gate(x)) * up(x), where gate and up are one matrix.

    By default, the activation is the component in the slot. https://arxiv.org/abs/1706.03762; gated: 2002.05202.
    """
    config = part.config
    layer = part.at("gate_up" if gated else "up")
    y = layer.linear(x, bias_of(part, "up"))
    gate, up = layer.split(y, {"gate": config.d_ff, "up": config.d_ff}) if gated else (y, 1)
    hidden = up * (part.at("activation", config.activation)(gate) if activation is None else activation(part, gate))
    return part.at("down").linear(part.at("inner_norm", config.inner_norm)(hidden), bias_of(part, "down"))


def bias_of(part: Part, name: str) -> bool:
    """Return True if a linear layer has a bias: `bias` is a boolean, or has a boolean for each layer."""
    bias = part.config.bias
    return bias if isinstance(bias, bool) else bool(dict(bias)[name])


FFNS: dict[str, Function] = {
    "mlp": mlp,
    "glu": partial(mlp, gated=True),
    **{name: partial(mlp, activation=ACTIVATIONS[name]) for name in ("relu", "gelu", "silu", "relu2", "quick_gelu")},
    "reglu": partial(mlp, activation=ACTIVATIONS["relu"], gated=True),
    "geglu": partial(mlp, activation=gelu, gated=True),
    "swiglu": partial(mlp, activation=ACTIVATIONS["silu"], gated=True),
}

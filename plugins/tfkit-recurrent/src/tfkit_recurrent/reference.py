"""Definitions of the mixers in NumPy, token by token, independent of their modules: functions for `tfkit.reference`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfkit.reference import Part


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def softplus(x: Any) -> Any:
    """Return log(1 + exp(x))."""
    return np.logaddexp(0, x)


def conv(part: Part, x: Any, *, bias: bool) -> Any:
    """Compute a weighted sum of each token and the tokens before it, the newest token last in the weights."""
    weight = part.weight("conv.weight")[:, 0].T
    y = np.zeros_like(x)
    for t in range(len(x)):
        for back, taps in enumerate(weight[::-1][: t + 1]):
            y[t] += taps * x[t - back]
    return y + part.weight("conv.bias") if bias else y


def linear(part: Part, name: str, x: Any, *, bias: bool = False) -> Any:
    """Compute a linear layer of the mixer."""
    return part.at(name).linear(x, bias)


def fused(part: Part, name: str, x: Any, sizes: dict[str, int], *, bias: bool = False) -> list[Any]:
    """Compute the parts of a fused linear layer of the mixer."""
    return [*part.at(name).split(linear(part, name, x, bias=bias), sizes)]


def short_conv(part: Part, x: Any) -> Any:
    """Compute output(after * conv(before * x)). https://arxiv.org/abs/2511.23404."""
    bias = part.config.bias
    width = x.shape[-1]
    before, after, x = fused(part, "input", x, {"before": width, "after": width, "x": width}, bias=bias)
    return linear(part, "output", after * conv(part, before * x, bias=bias), bias=bias)


def mamba(part: Part, x: Any) -> Any:
    """Compute a state space of each channel. https://arxiv.org/abs/2312.00752."""
    config = part.config
    x, gate = fused(part, "input", x, {"x": config.d_inner, "gate": config.d_inner}, bias=config.bias)
    x = part.at("activation", config.activation)(conv(part, x, bias=config.conv_bias))
    rates = fused(part, "rates", x, {"step_down": config.step_rank, "b": config.d_state, "c": config.d_state})
    names = ("step_norm", "b_norm", "c_norm")
    low, b, c = (part.at(name, config.inner_norm)(rate) for name, rate in zip(names, rates, strict=True))
    step = softplus(linear(part, "step_up", low) + part.weight("step_bias"))
    rate = -np.exp(part.weight("a_log")).reshape(config.d_inner, config.d_state)
    state, y = np.zeros_like(rate), np.zeros_like(x)
    for t in range(len(x)):
        state = np.exp(step[t][:, None] * rate) * state + np.outer(step[t] * x[t], b[t])
        y[t] = state @ c[t] + part.weight("skip") * x[t]
    return linear(part, "output", y * gate * sigmoid(gate), bias=config.bias)


def mamba2(part: Part, x: Any) -> Any:
    """Compute a state space of each head. https://arxiv.org/abs/2405.21060."""
    config = part.config
    inner, heads, groups = config.d_inner, config.n_heads, config.n_groups
    rows = groups * config.d_state
    sizes = {"gate": inner, "x": inner, "b": rows, "c": rows, "step": heads}
    parts = fused(part, "input", x * config.input_scale, sizes, bias=config.bias)
    factors = dict(config.factors)
    gate, x, b, c, step = (factors[name] * y for name, y in zip(sizes, parts, strict=True))
    mixed = conv(part, np.concatenate((x, b, c), axis=-1), bias=config.conv_bias)
    mixed = part.at("activation", config.activation)(mixed)
    x, b, c = np.split(mixed, [inner, inner + rows], axis=-1)
    step = np.clip(softplus(step + part.weight("step_bias")), config.step_min, config.step_max or np.inf)
    decay = np.exp(-np.exp(part.weight("a_log")) * step)
    y = np.zeros((len(x), heads, config.d_head))
    states = np.zeros((heads, config.d_state, config.d_head))
    for t in range(len(x)):
        inputs = x[t].reshape(heads, -1)
        writes, reads = (rates[t].reshape(groups, -1) for rates in (b, c))
        for h in range(heads):
            group = h * groups // heads
            states[h] = decay[t, h] * states[h] + step[t, h] * np.outer(writes[group], inputs[h])
            y[t, h] = reads[group] @ states[h] + part.weight("skip")[h] * inputs[h]
    y, gate = y.reshape(len(y), groups, -1), (gate * sigmoid(gate)).reshape(len(y), groups, -1)
    norm = part.at("norm", config.output_norm)
    y = norm(y * gate) if config.gate == "before_norm" else norm(y) * gate
    bias = config.bias if config.output_bias is None else config.output_bias
    return linear(part, "output", y.reshape(len(y), -1), bias=bias)


def delta_rule(q: Any, k: Any, v: Any, decay: Any, beta: Any) -> Any:
    """Run the delta rule of one head: q, k and decay [t, k or 1], v [t, v], beta [t] -> [t, v]."""
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    state, y = np.zeros((k.shape[1], v.shape[1])), np.zeros_like(v)
    for t in range(len(v)):
        state = decay[t][:, None] * state
        state += np.outer(k[t], beta[t] * (v[t] - k[t] @ state))
        y[t] = q[t] @ state / np.sqrt(k.shape[1])
    return y


def gated_delta(part: Part, x: Any) -> Any:
    """Compute a delta rule whose heads decay. https://arxiv.org/abs/2412.06464."""
    config = part.config
    keys, heads = config.n_key_heads * config.d_key, config.n_heads
    mixed = part.at("activation", config.activation)(conv(part, linear(part, "project", x), bias=False))
    q, k, v = np.split(mixed, [keys, 2 * keys], axis=-1)
    q, k = (y.reshape(len(x), config.n_key_heads, -1) for y in (q, k))
    v = v.reshape(len(x), heads, -1)
    beta, step = fused(part, "rates", x, {"beta": heads, "step": heads})
    beta = sigmoid(beta) * (2 if config.negative else 1)
    decay = np.exp(-np.exp(part.weight("a_log")) * softplus(step + part.weight("step_bias")))
    key_heads = [h * config.n_key_heads // heads for h in range(heads)]
    outputs = [delta_rule(q[:, g], k[:, g], v[:, h], decay[:, h, None], beta[:, h]) for h, g in enumerate(key_heads)]
    y = part.at("norm", config.output_norm)(np.stack(outputs, axis=1))
    gate = part.at("gate_activation", config.gate_activation)(linear(part, "gate", x))
    return linear(part, "output", (y * gate.reshape(y.shape)).reshape(len(x), -1))


def kda(part: Part, x: Any) -> Any:
    """Compute a delta rule whose channels decay. https://arxiv.org/abs/2510.26692."""
    config = part.config
    mixed = part.at("activation", config.activation)(conv(part, linear(part, "project", x), bias=False))
    q, k, v = (y.reshape(len(x), config.n_heads, -1) for y in np.split(mixed, 3, axis=-1))
    hidden = [linear(part, name, x) if config.low_rank else x for name in ("decay_down", "gate_down")]
    step = (linear(part, "decay_up", hidden[0]) + part.weight("step_bias")).reshape(q.shape)
    scale, bound = np.exp(part.weight("a_log"))[:, None], config.max_rate
    decay = np.exp(-scale * softplus(step) if bound is None else -bound * sigmoid(scale * step))
    beta = sigmoid(linear(part, "beta", x))
    heads = range(config.n_heads)
    y = np.stack([delta_rule(q[:, h], k[:, h], v[:, h], decay[:, h], beta[:, h]) for h in heads], axis=1)
    gate = sigmoid(linear(part, "gate_up", hidden[1])).reshape(y.shape)
    return linear(part, "output", (part.at("norm", config.output_norm)(y) * gate).reshape(len(x), -1))


def lightning(part: Part, x: Any) -> Any:
    """Compute linear attention whose heads decay at constant rates. https://arxiv.org/abs/2501.08313."""
    config = part.config
    mixed = part.at("activation", config.activation)(linear(part, "project", x))
    q, k, v = (y.reshape(len(x), config.n_heads, -1) for y in np.split(mixed, 3, axis=-1))
    decay, y = np.exp(-part.weight("slopes")), np.zeros_like(v)
    for h in range(config.n_heads):
        state = np.zeros((config.d_head, config.d_head))
        for t in range(len(x)):
            state = decay[h] * state + np.outer(k[t, h], v[t, h])
            y[t, h] = q[t, h] @ state
    y = part.at("norm", config.output_norm)(y.reshape(len(x), -1))
    return linear(part, "output", y * sigmoid(linear(part, "gate", x)))


def rg_lru(part: Part, x: Any) -> Any:
    """Compute a gated linear recurrence; the first token is written in full. https://arxiv.org/abs/2402.19427."""
    config = part.config
    x, y = fused(part, "input", x, {"x": config.d_inner, "y": config.d_inner}, bias=config.bias)
    x = conv(part, x, bias=config.conv_bias)
    blocks = x.reshape(len(x), config.n_blocks, -1)
    gates = np.einsum("thi,hoi->tho", blocks, part.weight("gates.weight")) + part.weight("gates.bias")
    opening, recurrence = (sigmoid(gate).reshape(x.shape) for gate in np.split(gates, 2, axis=-1))
    decay = np.exp(-8 * recurrence * softplus(part.weight("decay")))
    state, states = np.zeros(config.d_inner), np.zeros_like(x)
    for t in range(len(x)):
        growth = np.sqrt(1 - decay[t] ** 2) if t else 1
        state = decay[t] * state + growth * opening[t] * x[t]
        states[t] = state
    y = part.at("activation", config.activation)(y)
    return linear(part, "output", states * y, bias=config.bias)


def shifted(part: Part, x: Any, *names: str) -> list[Any]:
    """Mix each token with the token before it, for each of the targets."""
    before = np.vstack((np.zeros_like(x[:1]), x[:-1]))
    mixes = [part.weight(f"{name}_mix") for name in names]
    return [mix * x + (1 - mix) * before for mix in mixes]


def rwkv4(part: Part, x: Any) -> Any:
    """Compute a decaying mean of the values of each channel, as sums of weights. https://arxiv.org/abs/2305.13048."""
    names = ("key", "value", "receptance")
    k, v, r = (linear(part, name, mixed) for name, mixed in zip(names, shifted(part, x, *names), strict=True))
    rate, y = np.exp(part.weight("decay")), np.zeros_like(v)
    for t in range(len(x)):
        logs = k[: t + 1] - rate * np.arange(t - 1, -2, -1)[:, None]
        logs[t] = k[t] + part.weight("bonus")
        weights = np.exp(logs - logs.max(axis=0))
        y[t] = (weights * v[: t + 1]).sum(axis=0) / weights.sum(axis=0)
    return linear(part, "output", sigmoid(r) * y)


def mlstm(part: Part, x: Any) -> Any:
    """Compute linear attention with exponential gates, in its stabilized form. https://arxiv.org/abs/2405.04517."""
    config = part.config
    keys = config.n_heads * config.d_key
    q, k, v = np.split(linear(part, "project", x), [keys, 2 * keys], axis=-1)
    q, k, v = (y.reshape(len(x), config.n_heads, -1) for y in (q, k, v))
    gates = fused(part, "rates", x, {"input": config.n_heads, "forget": config.n_heads})
    biases = (part.weight("input_bias"), part.weight("forget_bias"))
    cap = config.gate_softcap
    i, f = (cap * np.tanh((gate + bias) / cap) for gate, bias in zip(gates, biases, strict=True))
    log_decay, y = -softplus(-f), np.zeros_like(v)
    for h in range(config.n_heads):
        state, normalizer, largest = np.zeros((config.d_key, config.d_value)), np.zeros(config.d_key), 0.0
        for t in range(len(x)):
            before, largest = largest, max(log_decay[t, h] + largest, i[t, h])
            decay, write = np.exp(log_decay[t, h] + before - largest), np.exp(i[t, h] - largest)
            state = decay * state + write * np.outer(k[t, h], v[t, h])
            normalizer = decay * normalizer + write * k[t, h]
            query = q[t, h] / np.sqrt(config.d_key)
            y[t, h] = query @ state / (max(abs(query @ normalizer), np.exp(-largest)) + config.eps)
    y = part.at("norm", config.output_norm)(y)
    return linear(part, "output", y.reshape(len(x), -1) * sigmoid(linear(part, "gate", x)))


def channel_mix(part: Part, x: Any) -> Any:
    """Compute sigmoid(receptance) value(activation(key)), of shifted tokens. https://arxiv.org/abs/2305.13048."""
    key, receptance = shifted(part, x, "key", "receptance")
    hidden = part.at("activation", part.config.activation)(linear(part, "key", key))
    return sigmoid(linear(part, "receptance", receptance)) * linear(part, "value", hidden)


def scaled(part: Part, x: Any) -> Any:
    """Compute activation(factor * x)."""
    return part.at("activation", part.config.activation)(part.config.factor * x)


KINDS = {
    "activation": {"scaled": scaled},
    "ffn": {"channel_mix": channel_mix},
    "mixer": {
        function.__name__: function
        for function in (short_conv, mamba, mamba2, gated_delta, kda, lightning, rg_lru, rwkv4, mlstm)
    },
}

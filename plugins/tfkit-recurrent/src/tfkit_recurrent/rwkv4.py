"""Time mixing of RWKV-4, https://arxiv.org/abs/2305.13048: a mean of all earlier values, whose weights decay.

    k, v, r = key(mix(x)), value(mix(x)), receptance(mix(x));  mix(x_t) = mix x_t + (1 - mix) x_(t-1)
    y_t = (sum_(i<t) exp(k_i - (t - 1 - i) exp(decay)) v_i + exp(k_t + bonus) v_t) / (the sum of these weights)
    output(sigmoid(r) y)

b batch, t positions, m d_model, c d_inner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit.nn import Context, Linear
from tfkit_recurrent.recurrence import EMPTY, decaying_mean, values_of, widened
from tfkit_recurrent.token_shift import previous_tokens, reset_mix

CHUNK = 32
MAX_DECAY = 60.0


class RWKV4Config(tfkit.MixerConfig):
    """A mean of all earlier values for each channel, with weights exp(key) that decay at a constant rate."""

    kind: Literal["rwkv4"] = "rwkv4"
    free_length = False
    chunk_attributes = ("chunk",)
    restarts = True
    d_inner: tfkit.Dim
    """Width of keys, values and receptance."""

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        return (tfkit.State(1, 1, self.d_model), tfkit.State(1, 3, self.d_inner, wide=True))

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        """Keys, values and receptance before its sigmoid, the input of the output projection, and the state."""
        shape = f"[b, t, {self.d_inner}]"
        names = ("key", "value", "receptance")
        values = {name: tfkit.InnerValue(name, None, shape) for name in names}
        return {**values, **values_of(self.cached, self.d_inner)}

    def build(self, make: tfkit.Make) -> nn.Module:
        layer, n_layers = make.layer or 0, make.n_layers or 1
        return RWKV4(self, depth=layer / max(1, n_layers - 1), height=1 - layer / n_layers)


class RWKV4(nn.Module):
    """[b, t, m] -> [b, t, m].

    The rows of its second state, [b, 1, 3, c], are the mean of the values so far, the logarithm of its weight, and 1
    once a sequence has a token. The first state is the last token.

    Args:
        config: its sizes.
        depth: the position of its layer in the stack, from 0 for the first to 1 for the last layer, for initial values.
        height: the fraction of the layers that are not before its layer.
    """

    def __init__(self, config: RWKV4Config, *, depth: float, height: float) -> None:
        super().__init__()
        width, inner = config.d_model, config.d_inner
        self.key_mix = nn.Parameter(torch.empty(width))
        self.value_mix = nn.Parameter(torch.empty(width))
        self.receptance_mix = nn.Parameter(torch.empty(width))
        self.key = Linear(width, inner, bias=False)
        self.value = Linear(width, inner, bias=False)
        self.receptance = Linear(width, inner, bias=False)
        self.decay = nn.Parameter(torch.empty(inner))
        self.bonus = nn.Parameter(torch.empty(inner))
        self.output = Linear(inner, width, bias=False, residual=True)
        self.depth, self.height = depth, height
        self.max_decay = MAX_DECAY
        self.empty = EMPTY
        self.chunk = CHUNK

    def reset_parameters(self) -> None:
        """Fill mixes, decays from exp(-5) to exp(3), and bonuses around log(0.3); mixes and decays depend on depth."""
        reset_mix(self.key_mix, self.height)
        reset_mix(self.value_mix, self.height, 0.3 * self.depth)
        reset_mix(self.receptance_mix, 0.5 * self.height)
        inner = self.decay.size(0)
        channels = torch.arange(inner, dtype=torch.float32, device=self.decay.device)
        with torch.no_grad():
            self.decay.copy_(-5 + 8 * (channels / max(1, inner - 1)) ** (0.7 + 1.3 * self.depth))
            self.bonus.copy_(math.log(0.3) + 0.5 * ((channels + 1) % 3 - 1))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        previous = previous_tokens(x, context, 0)
        k = self.key(torch.lerp(previous, x, self.key_mix))
        v = self.value(torch.lerp(previous, x, self.value_mix))
        gate = torch.sigmoid(self.receptance(torch.lerp(previous, x, self.receptance_mix)))
        return self.output(gate * self.recur(widened(k), widened(v), context).to(gate.dtype))

    def recur(self, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Run the recurrence: k and v [b, t, c] -> [b, t, c]."""
        # Beyond the limit, a decay leaves nothing of the state after one token; an infinite decay would give NaN.
        log_decay, bonus = -widened(self.decay).clamp(max=self.max_decay).exp(), widened(self.bonus)
        cache = context.cache
        mean = torch.zeros_like(k[:, 0])
        weight = torch.full_like(mean, self.empty)
        if cache is not None:
            mean, stored, started = widened(cache.tensors[1][:, 0]).unbind(1)
            weight = torch.where(started > 0, stored, weight)
        y, mean, weight = decaying_mean(
            k, v, log_decay, bonus, mean, weight, self.chunk, context.padding, context.documents, self.empty
        )
        if cache is not None:
            started = (weight > 0.5 * self.empty).to(weight.dtype)
            cache.tensors[1].copy_(torch.stack((mean, weight * started, started), dim=1)[:, None])
        return y

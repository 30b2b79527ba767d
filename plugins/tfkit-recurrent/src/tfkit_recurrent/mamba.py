"""Mamba, https://arxiv.org/abs/2312.00752: a state of each channel whose decay, input and output depend on the token.

    x, gate = input(x);  x = activation(conv(x));  step, b, c = rates(x);  step = softplus(step_up(step) + step_bias)
    h_t = exp(-exp(a_log) step_t) h_(t-1) + step_t b_t x_t;  y_t = c_t h_t + skip x_t;  output(y silu(gate))

b batch, t positions, d d_inner, n channels of a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.nn import Context, Linear, Rearrange
from tfkit_recurrent.conv import CausalConv
from tfkit_recurrent.rates import reset_log_decay, reset_step_bias
from tfkit_recurrent.recurrence import continues, linear_scan, values_of, widened

CHUNK = 16


class MambaConfig(tfkit.MixerConfig):
    """A state space model whose channels decay by step sizes computed from the token."""

    kind: Literal["mamba"] = "mamba"
    free_length = False
    chunk_attributes = ("chunk",)
    restarts = True
    d_inner: tfkit.Dim
    """Width of the convolution and of the recurrence."""
    d_state: tfkit.Dim = 16
    """Numbers in the state of a channel."""
    step_rank: tfkit.Dim
    """Width from which the step sizes of all channels are computed."""
    size: tfkit.Count = 4
    """Number of tokens that the convolution covers."""
    bias: tfkit.Shared[bool] = False
    """If true, the first and the last linear layer have biases."""
    conv_bias: bool = True
    """If true, the convolution has a bias."""
    activation: tfkit.ActivationConfig = tfkit.slot("silu")
    """Activation after the convolution."""
    inner_norm: tfkit.NormConfig | None = None
    """Norm of each of `step`, `b` and `c`, the numbers that control the recurrence."""

    @property
    def pattern_sizes(self) -> Mapping[str, int]:
        """Sizes by letter: d channels, n numbers in the state of a channel."""
        return {"d": self.d_inner, "n": self.d_state}

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        state = tfkit.State(1, self.d_inner, self.d_state, wide=True)
        return (tfkit.State(1, self.size - 1, self.d_inner), state)

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        """The numbers that steps are computed from, the input of the output projection, and the state."""
        step = tfkit.InnerValue("step_up", None, f"[b, t, {self.d_inner}]")
        return {"step": step, **values_of(self.cached, self.d_inner)}

    def build(self, make: tfkit.Make) -> nn.Module:
        norms = None
        if self.inner_norm is not None:
            norms = [make(self.inner_norm, width) for width in (self.step_rank, self.d_state, self.d_state)]
        return Mamba(self, activation=make(self.activation), norms=norms)


class Mamba(nn.Module):
    """[b, t, d_model] -> [b, t, d_model]."""

    def __init__(self, config: MambaConfig, *, activation: nn.Module, norms: list[nn.Module] | None) -> None:
        super().__init__()
        inner, rank, rows = config.d_inner, config.step_rank, config.d_state
        self.input = Linear(config.d_model, {"x": inner, "gate": inner}, bias=config.bias)
        self.conv = CausalConv(inner, config.size, bias=config.conv_bias)
        self.activation = activation
        self.rates = Linear(inner, {"step_down": rank, "b": rows, "c": rows}, bias=False)
        self.step_norm = None if norms is None else norms[0]
        self.b_norm = None if norms is None else norms[1]
        self.c_norm = None if norms is None else norms[2]
        self.step_up = Linear(rank, inner, bias=False)
        self.step_bias = nn.Parameter(torch.empty(inner))
        self.a_log = nn.Parameter(torch.empty(inner * rows))
        self.skip = nn.Parameter(torch.empty(inner))
        self.output = Linear(inner, config.d_model, bias=config.bias, residual=True)
        self.split_rates = Rearrange("(d n) -> d n", n=rows)
        self.rank, self.inner, self.rows = rank, inner, rows
        self.chunk = CHUNK

    def reset_parameters(self) -> None:
        """Fill the parameters of the recurrence: decays from 1 to d_state in each channel, steps from 0.001 to 0.1."""
        reset_log_decay(self.split_rates(self.a_log))
        reset_step_bias(self.step_bias)
        nn.init.ones_(self.skip)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, gate = self.input(x).chunk(2, dim=-1)
        x = self.activation(self.conv(x, context, 0))
        step, b, c = self.rates(x).split([self.rank, self.rows, self.rows], dim=-1)
        if self.step_norm is not None and self.b_norm is not None and self.c_norm is not None:
            step, b, c = self.step_norm(step), self.b_norm(b), self.c_norm(c)
        step = F.softplus(widened(self.step_up(step)) + widened(self.step_bias))
        padding = context.padding
        if padding is not None:  # a step of zero: nothing decays, and nothing is written
            step = step * padding[:, :, None]
        y = self.recur(widened(x), step, widened(b), widened(c), context) + widened(self.skip) * x
        return self.output((y * F.silu(widened(gate))).to(gate.dtype))

    def recur(self, x: Tensor, step: Tensor, b: Tensor, c: Tensor, context: Context) -> Tensor:
        """Run the recurrence: x and step [b, t, d], b and c [b, t, n] -> [b, t, d]."""
        rate = -self.split_rates(widened(self.a_log)).exp()
        cache, documents = context.cache, context.documents
        state = x.new_zeros([x.size(0), self.inner, self.rows])
        if cache is not None:
            state = widened(cache.tensors[1][:, 0])
        outputs: list[Tensor] = []
        inputs = zip(x.split(self.chunk, 1), step.split(self.chunk, 1))  # noqa: B905  TorchScript has no `strict`
        chunks = zip(inputs, b.split(self.chunk, 1), c.split(self.chunk, 1))  # noqa: B905
        for index, ((tokens, steps), columns, rows) in enumerate(chunks):
            decay, write = (steps[..., None] * rate).exp(), (steps * tokens)[..., None] * columns[:, :, None]
            if documents is not None:
                first = index * self.chunk
                decay = decay * continues(documents)[:, first : first + self.chunk, None, None]
            states = linear_scan(decay, write, state)
            outputs.append((states @ rows[..., None])[..., 0])
            state = states[:, -1]
        if cache is not None:
            cache.tensors[1].copy_(state[:, None])
        return torch.cat(outputs, dim=1)

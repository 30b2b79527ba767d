"""Mamba-2, https://arxiv.org/abs/2405.21060: a state of each head that decays by a step size computed from the token.

    gate, x, b, c, step = input(x);  x, b, c = activation(conv(x, b, c));  step = softplus(step + step_bias)
    S_t = exp(-exp(a_log) step_t) S_(t-1) + b_t' step_t x_t;  y_t = c_t S_t + skip x_t;  output(norm(y silu(gate)))

b batch, t positions, h heads, g groups, r heads of a group, h = (g r), n channels of a state, d width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.nn import Context, Linear, Rearrange, named
from tfkit_recurrent.conv import CausalConv
from tfkit_recurrent.kernels import attend
from tfkit_recurrent.rates import reset_log_decay, reset_step_bias
from tfkit_recurrent.recurrence import values_of, widened

CHUNK = 64


class FactorsConfig(tfkit.Config):
    """Constant factors of the parts of the input projection."""

    gate: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    step: float = 1.0


class Mamba2Config(tfkit.MixerConfig):
    """A state space model whose heads decay by step sizes computed from the token."""

    kind: Literal["mamba2"] = "mamba2"
    free_length = False
    chunk_attributes = ("chunk",)
    restarts = True
    n_heads: tfkit.Count
    """Number of heads."""
    d_head: tfkit.Dim
    """Width of one head."""
    n_groups: tfkit.Count = 1
    """Number of groups of heads that share `b` and `c`, and of channels that are normed together."""
    d_state: tfkit.Dim
    """Rows of the state of a head."""
    size: tfkit.Count = 4
    """Number of tokens that the convolution covers."""
    bias: tfkit.Shared[bool] = False
    """If true, the linear layers have biases."""
    output_bias: bool | None = None
    """If true, the output projection has a bias; by default as `bias`."""
    conv_bias: bool = True
    """If true, the convolution has a bias."""
    activation: tfkit.ActivationConfig = tfkit.slot("silu")
    """Activation after the convolution."""
    output_norm: tfkit.NormConfig | None = tfkit.slot("rmsnorm")
    """Norm before the output projection, for each group; null for none."""
    gate: Literal["before_norm", "after_norm"] = "before_norm"
    """Side of the norm on which the output is multiplied by silu(gate)."""
    step_min: float = 0.0
    """Minimum step size."""
    step_max: tfkit.PositiveFloat | None = None
    """Maximum step size; null for none."""
    input_scale: float = 1.0
    """Factor of the input."""
    factors: FactorsConfig = FactorsConfig()
    """Factors of the parts of the input projection."""

    def check(self) -> None:
        super().check()
        if self.n_heads % self.n_groups:
            message = f"n_heads ({self.n_heads}) must be a multiple of n_groups ({self.n_groups})"
            raise tfkit.Invalid(
                "n_groups", message, notes=[f"divisors of {self.n_heads}: {tfkit.divisors(self.n_heads)}"]
            )
        if self.step_min < 0:
            raise tfkit.Invalid("step_min", f"`step_min` must be at least 0; got {self.step_min}")
        if self.step_max is not None and self.step_max <= self.step_min:
            message = f"`step_max` must be larger than `step_min`, {self.step_min}; got {self.step_max}"
            raise tfkit.Invalid("step_max", message)
        if self.gate == "after_norm" and self.output_norm is None:
            raise tfkit.Invalid("gate", "`gate` has no effect without `output_norm`", help="leave it out")

    @property
    def d_inner(self) -> int:
        """Width of all heads together."""
        return self.n_heads * self.d_head

    @property
    def pattern_sizes(self) -> Mapping[str, int]:
        """Sizes by letter: h heads, g groups, r heads of a group, d the width of a head, n rows of a state."""
        heads = {"h": self.n_heads, "g": self.n_groups, "r": self.n_heads // self.n_groups}
        return {**heads, "d": self.d_head, "n": self.d_state}

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        width = self.d_inner + 2 * self.n_groups * self.d_state
        state = tfkit.State(self.n_heads, self.d_state, self.d_head, wide=True)
        return (tfkit.State(1, self.size - 1, width), state)

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        """The input of the output projection, and the state."""
        return values_of(self.cached, self.d_inner)

    def build(self, make: tfkit.Make) -> nn.Module:
        norm = None
        if self.output_norm is not None:
            norm = make(self.output_norm, self.d_inner // self.n_groups, self.n_groups)
        return Mamba2(self, activation=make(self.activation), norm=norm)


class Mamba2(nn.Module):
    """[b, t, d_model] -> [b, t, d_model]."""

    def __init__(self, config: Mamba2Config, *, activation: nn.Module, norm: nn.Module | None) -> None:
        super().__init__()
        heads, groups, rows, inner = config.n_heads, config.n_groups, config.d_state, config.d_inner
        parts = {"gate": inner, "x": inner, "b": groups * rows, "c": groups * rows, "step": heads}
        output_bias = config.bias if config.output_bias is None else config.output_bias
        self.input = Linear(config.d_model, parts, bias=config.bias)
        self.conv = CausalConv(inner + 2 * groups * rows, config.size, bias=config.conv_bias)
        self.activation = activation
        self.a_log = nn.Parameter(torch.empty(heads))
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.empty(heads))
        self.norm = norm
        self.output = Linear(inner, config.d_model, bias=output_bias, residual=True)
        self.split_heads = Rearrange("b t (g r d) -> b g r t d", g=groups, d=config.d_head)
        self.split_groups = Rearrange("b t (g n) -> b g t n", g=groups)
        self.split_steps = Rearrange("b t (g r) -> b g r t", g=groups)
        self.per_group = Rearrange("(g r) -> g r", g=groups)
        self.split_state = Rearrange("b (g r) n d -> b g r n d", g=groups)
        self.merge_state = Rearrange("b g r n d -> b (g r) n d")
        self.norm_groups = Rearrange("b g r t d -> b g t (r d)")
        self.gate_groups = Rearrange("b t (g i) -> b g t i", g=groups)
        self.merge_groups = Rearrange("b g t i -> b t (g i)")
        self.inner, self.rows, self.heads = inner, groups * rows, heads
        self.gated_first = config.gate == "before_norm"
        self.step_min, self.step_max = config.step_min, config.step_max
        self.input_scale = config.input_scale
        values = config.factors
        self.factors = [values.gate, values.x, values.b, values.c, values.step]
        self.chunk = CHUNK

    def reset_parameters(self) -> None:
        """Fill the parameters of the recurrence: decays from 1 to the number of heads, steps from 0.001 to 0.1."""
        reset_log_decay(self.a_log)
        reset_step_bias(self.step_bias)
        nn.init.ones_(self.skip)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        gate, mixed, step = self.project(x)
        x, b, c = self.activation(self.conv(mixed, context, 0)).split([self.inner, self.rows, self.rows], dim=-1)
        y = self.recur(self.split_heads(x), self.split_groups(b), self.split_groups(c), step, context)
        return self.output(self.gated(y, self.gate_groups(gate)).to(gate.dtype))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gate, the input of the convolution, and the step sizes before the softplus."""
        if self.input_scale != 1.0:
            x = x * self.input_scale
        sizes = [self.inner, self.inner, self.rows, self.rows, self.heads]
        gate, x, b, c, step = self.input(x).split(sizes, dim=-1)
        f = self.factors
        mixed = torch.cat((f[1] * x, f[2] * b, f[3] * c), dim=-1)
        return f[0] * gate, mixed, f[4] * step

    def recur(self, x: Tensor, b: Tensor, c: Tensor, step: Tensor, context: Context) -> Tensor:
        """Run the recurrence: x [b, g, r, t, d], b and c [b, g, t, n], step [b, t, h] -> [b, g, r, t, d]."""
        step = F.softplus(widened(step) + widened(self.step_bias))
        if self.step_min > 0.0 or self.step_max is not None:
            step = torch.clamp(step, min=self.step_min, max=self.step_max)
        padding = context.padding
        if padding is not None:  # a step of zero: nothing decays, and nothing is written
            step = step * padding[:, :, None]
        x, step = widened(x), self.split_steps(step)
        log_decay = -self.per_group(widened(self.a_log).exp())[..., None] * step
        cache = context.cache
        earlier: Tensor | None = None
        if cache is not None:
            earlier = self.split_state(widened(cache.tensors[1]))
        write, documents = step[..., None] * x, context.documents
        y, state = attend(widened(c), widened(b), write, log_decay, earlier, self.chunk, documents)
        if cache is not None:
            cache.tensors[1].copy_(self.merge_state(state))
        return y + self.per_group(widened(self.skip))[..., None, None] * x

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Multiply y [b, g, r, t, d] by the gate [b, g, t, (r d)] and norm each group -> [b, t, (g r d)]."""
        dtype = gate.dtype  # the dtype of the norm's weights; y is in float32
        y, gate = self.norm_groups(y), F.silu(widened(gate))
        if self.norm is None:
            return self.merge_groups(y * gate)
        if self.gated_first:
            return self.merge_groups(self.norm((y * gate).to(dtype)))
        return self.merge_groups(self.norm(y.to(dtype)) * gate)

    def extra_repr(self) -> str:
        return named(step_min=self.step_min, step_max=self.step_max, input_scale=self.input_scale)

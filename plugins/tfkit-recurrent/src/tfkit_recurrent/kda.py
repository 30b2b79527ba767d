"""Kimi Delta Attention, https://arxiv.org/abs/2510.26692: a gated delta rule with a decay for each channel of the keys.

    q, k, v = activation(conv(project(x)));  q and k are normed to length 1, q is divided by d ** 0.5
    decay = exp(-exp(a_log) softplus(decay_up(decay_down(x)) + step_bias));  beta = sigmoid(beta(x))
    output(norm(y) sigmoid(gate_up(gate_down(x))))

With `low_rank: false`, there is no decay_down and no gate_down: decay_up and gate_up read x. With a `max_rate`,
decay = exp(-max_rate sigmoid(exp(a_log) (decay_up(...) + step_bias))).

b batch, t positions, h heads, d width of a head.
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
from tfkit_recurrent.gated_delta import DeltaRule, rule_values
from tfkit_recurrent.rates import reset_decay_rates, reset_step_bias
from tfkit_recurrent.recurrence import values_of, widened

CHUNK = 16
"""Decays between all pairs of positions of a chunk are computed for each channel: chunks are shorter."""


class KimiDeltaConfig(tfkit.MixerConfig):
    """A gated delta rule with a decay for each channel of the keys."""

    kind: Literal["kda"] = "kda"
    free_length = False
    chunk_attributes = ("rule.chunk",)
    restarts = True
    n_heads: tfkit.Count
    """Number of heads."""
    d_head: tfkit.Dim
    """Width of one head, and with `low_rank` of the layers that the decay and the gate are computed from."""
    size: tfkit.Count = 4
    """Number of tokens that the convolution covers."""
    activation: tfkit.ActivationConfig = tfkit.slot("silu")
    """Activation after the convolution."""
    output_norm: tfkit.NormConfig = tfkit.slot("rmsnorm")
    """Norm of the output of each head."""
    low_rank: bool = True
    """If true, the decay and the gate are computed by two layers each, with d_head channels between them; if false, by
    a single layer each."""
    max_rate: tfkit.PositiveFloat | None = None
    """Bound of the rates of decay, which a sigmoid approaches; by default, a softplus computes them without a bound."""

    @property
    def pattern_sizes(self) -> Mapping[str, int]:
        """Sizes by letter: h heads, d the width of a head."""
        return {"h": self.n_heads, "d": self.d_head}

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        width = 3 * self.n_heads * self.d_head
        return (tfkit.State(1, self.size - 1, width), tfkit.State(self.n_heads, self.d_head, self.d_head, wide=True))

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        """Arguments and heads of the delta rule, the gate before its activation, and the state."""
        values = rule_values(self.n_heads, self.n_heads, self.d_head, self.d_head, self.d_head)
        gate = tfkit.InnerValue("gate_up", None, f"[b, t, {self.n_heads * self.d_head}]")
        return {**values, "gate": gate, **values_of(self.cached, self.n_heads * self.d_head)}

    def build(self, make: tfkit.Make) -> nn.Module:
        return KimiDelta(self, activation=make(self.activation), norm=make(self.output_norm, self.d_head))


class KimiDelta(nn.Module):
    """[b, t, d_model] -> [b, t, d_model]."""

    def __init__(self, config: KimiDeltaConfig, *, activation: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        width, head = config.n_heads * config.d_head, config.d_head
        self.project = Linear(config.d_model, {"q": width, "k": width, "v": width}, bias=False)
        self.conv = CausalConv({"q_conv": width, "k_conv": width, "v_conv": width}, config.size, bias=False)
        self.activation = activation
        rank = head if config.low_rank else config.d_model
        self.decay_down = Linear(config.d_model, rank, bias=False) if config.low_rank else None
        self.decay_up = Linear(rank, width, bias=False)
        self.a_log = nn.Parameter(torch.empty(config.n_heads))
        self.step_bias = nn.Parameter(torch.empty(width))
        self.beta = Linear(config.d_model, config.n_heads, bias=False)
        self.gate_down = Linear(config.d_model, rank, bias=False) if config.low_rank else None
        self.gate_up = Linear(rank, width, bias=False)
        self.norm = norm
        self.output = Linear(width, config.d_model, bias=False, residual=True)
        self.rule = DeltaRule(config.n_heads, 1, head, head, CHUNK)
        self.split_heads = Rearrange("b t (h d) -> b h t d", d=head)
        self.split_rates = Rearrange("b t h -> b h t 1")
        self.split_gate = Rearrange("b t (h d) -> b t h d", d=head)
        self.swap = Rearrange("b h t d -> b t h d")
        self.merge_heads = Rearrange("b t h d -> b t (h d)")
        self.max_rate = config.max_rate

    def reset_parameters(self) -> None:
        """Fill the parameters of the decay: rates from 0 to 16, steps from 0.001 to 0.1."""
        reset_decay_rates(self.a_log)
        reset_step_bias(self.step_bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self.activation(self.conv(self.project(x), context, 0)).chunk(3, dim=-1)
        decay = self.decay_up(x if self.decay_down is None else self.decay_down(x))
        log_decay = -self.rates(self.split_heads(widened(decay) + widened(self.step_bias)))
        beta = self.split_rates(torch.sigmoid(widened(self.beta(x))))
        y = self.rule(self.split_heads(q), self.split_heads(k), self.split_heads(v), log_decay, beta, context)
        gate = self.split_gate(self.gate_up(x if self.gate_down is None else self.gate_down(x)))
        y = self.norm(self.swap(y).to(gate.dtype)) * torch.sigmoid(widened(gate))
        return self.output(self.merge_heads(y).to(gate.dtype))

    def rates(self, step: Tensor) -> Tensor:
        """Compute the rates of decay of all channels, [b, h, t, d], from steps before their activation."""
        scale, bound = widened(self.a_log).exp()[:, None, None], self.max_rate
        return scale * F.softplus(step) if bound is None else bound * torch.sigmoid(scale * step)

    def extra_repr(self) -> str:
        return named(max_rate=self.max_rate)

"""Gated DeltaNet, https://arxiv.org/abs/2412.06464: a state that decays, and is corrected where a token writes.

    q, k, v = activation(conv(project(x)));  q and k are normed to length 1, q is divided by d_k ** 0.5
    beta = sigmoid(rates(x));  decay = exp(-exp(a_log) softplus(rates(x) + step_bias));  output(norm(y) gate(x))

b batch, t positions, h heads of values, g heads of queries and keys, r heads of values for each of these, i the width
of all heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.nn import Context, Linear, Rearrange, is_scripting, named
from tfkit_recurrent.conv import CausalConv
from tfkit_recurrent.kernels import fla_delta_rule, has_kernel
from tfkit_recurrent.rates import reset_decay_rates, reset_step_bias
from tfkit_recurrent.recurrence import delta_rule, values_of, widened

CHUNK = 64
EPS = 1e-6


class GatedDeltaConfig(tfkit.MixerConfig):
    """A state that decays, and that each token corrects by the difference between its value and the stored value."""

    kind: Literal["gated_delta"] = "gated_delta"
    free_length = False
    chunk_attributes = ("rule.chunk",)
    restarts = True
    n_heads: tfkit.Count
    """Number of heads of values."""
    n_key_heads: tfkit.Count
    """Number of heads of queries and keys."""
    d_key: tfkit.Dim
    """Width of a head of queries and keys."""
    d_value: tfkit.Dim
    """Width of a head of values."""
    size: tfkit.Count = 4
    """Number of tokens that the convolution covers."""
    activation: tfkit.ActivationConfig = tfkit.slot("silu")
    """Activation after the convolution."""
    gate_activation: tfkit.ActivationConfig = tfkit.slot("silu")
    """Activation of the gate, which multiplies the normed output."""
    output_norm: tfkit.NormConfig = tfkit.slot("rmsnorm")
    """Norm of the output of each head."""
    negative: bool = False
    """If true, beta is doubled: a token can then reverse the sign of the value that the state stores under its key."""

    def check(self) -> None:
        super().check()
        if self.n_heads % self.n_key_heads:
            message = f"n_heads ({self.n_heads}) must be a multiple of n_key_heads ({self.n_key_heads})"
            notes = [f"divisors of {self.n_heads}: {tfkit.divisors(self.n_heads)}"]
            raise tfkit.Invalid("n_key_heads", message, notes=notes)

    @property
    def pattern_sizes(self) -> Mapping[str, int]:
        """Sizes by letter: g heads of queries and keys, r heads of values for each, q, k, v, z widths of a head."""
        groups = {"g": self.n_key_heads, "r": self.n_heads // self.n_key_heads, "h": self.n_heads}
        return {**groups, "q": self.d_key, "k": self.d_key, "v": self.d_value, "z": self.d_value}

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        width = 2 * self.n_key_heads * self.d_key + self.n_heads * self.d_value
        return (tfkit.State(1, self.size - 1, width), tfkit.State(self.n_heads, self.d_key, self.d_value, wide=True))

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        """Arguments and heads of the delta rule, the gate before its activation, and the state."""
        values = rule_values(self.n_key_heads, self.n_heads, self.d_key, self.d_value, 1)
        gate = tfkit.InnerValue("gate", None, f"[b, t, {self.n_heads * self.d_value}]")
        return {**values, "gate": gate, **values_of(self.cached, self.n_heads * self.d_value)}

    def build(self, make: tfkit.Make) -> nn.Module:
        return GatedDelta(
            self,
            activation=make(self.activation),
            norm=make(self.output_norm, self.d_value),
            gate_activation=make(self.gate_activation),
        )


def rule_values(n_key_heads: int, n_heads: int, d_key: int, d_value: int, d_decay: int) -> dict[str, tfkit.InnerValue]:
    """Return the arguments of a `DeltaRule`, the logarithms of decays among them, and its heads."""
    sizes = {"q": (n_key_heads, d_key), "k": (n_key_heads, d_key), "v": (n_heads, d_value)}
    sizes |= {"log_decay": (n_heads, d_decay), "beta": (n_heads, 1)}
    shapes = {name: f"[b, {heads}, t, {width}]" for name, (heads, width) in sizes.items()}
    values = {name: tfkit.InnerValue("rule", index, shape) for index, (name, shape) in enumerate(shapes.items())}
    return {**values, "heads": tfkit.InnerValue("rule", None, shapes["v"])}


class GatedDelta(nn.Module):
    """[b, t, d_model] -> [b, t, d_model]."""

    def __init__(
        self, config: GatedDeltaConfig, *, activation: nn.Module, norm: nn.Module, gate_activation: nn.Module
    ) -> None:
        super().__init__()
        keys, values = config.n_key_heads * config.d_key, config.n_heads * config.d_value
        self.project = Linear(config.d_model, {"q": keys, "k": keys, "v": values}, bias=False)
        self.conv = CausalConv({"q_conv": keys, "k_conv": keys, "v_conv": values}, config.size, bias=False)
        self.activation = activation
        self.rates = Linear(config.d_model, {"beta": config.n_heads, "step": config.n_heads}, bias=False)
        self.a_log = nn.Parameter(torch.empty(config.n_heads))
        self.step_bias = nn.Parameter(torch.empty(config.n_heads))
        self.gate = Linear(config.d_model, values, bias=False)
        self.norm = norm
        self.gate_activation = gate_activation
        self.output = Linear(values, config.d_model, bias=False, residual=True)
        self.rule = DeltaRule(config.n_heads, config.n_heads // config.n_key_heads, config.d_key, config.d_value, CHUNK)
        self.split_keys = Rearrange("b t (g d) -> b g t d", d=config.d_key)
        self.split_values = Rearrange("b t (h d) -> b h t d", d=config.d_value)
        self.split_rates = Rearrange("b t h -> b h t 1")
        self.split_gate = Rearrange("b t (h d) -> b t h d", d=config.d_value)
        self.swap = Rearrange("b h t d -> b t h d")
        self.merge_heads = Rearrange("b t h d -> b t (h d)")
        self.widths = [keys, keys, values]
        self.beta_scale = 2.0 if config.negative else 1.0

    def reset_parameters(self) -> None:
        """Fill the parameters of the decay: rates from 0 to 16, steps from 0.001 to 0.1."""
        reset_decay_rates(self.a_log)
        reset_step_bias(self.step_bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self.activation(self.conv(self.project(x), context, 0)).split(self.widths, dim=-1)
        beta, step = self.rates(x).chunk(2, dim=-1)
        beta = torch.sigmoid(widened(beta)) * self.beta_scale
        log_decay = -widened(self.a_log).exp() * F.softplus(widened(step) + widened(self.step_bias))
        y = self.rule(
            self.split_keys(q),
            self.split_keys(k),
            self.split_values(v),
            self.split_rates(log_decay),
            self.split_rates(beta),
            context,
        )
        gate = self.split_gate(self.gate(x))
        y = self.norm(self.swap(y).to(gate.dtype)) * self.gate_activation(widened(gate))
        return self.output(self.merge_heads(y).to(gate.dtype))

    def extra_repr(self) -> str:
        return named(beta_scale=self.beta_scale)


class DeltaRule(nn.Module):
    """Queries and keys [b, g, t, d], values [b, h, t, d], log decays and beta [b, h, t, 1 or d] -> [b, h, t, d].

    The state is tensor 1 of the cache, [b, h, d of keys, d of values].
    """

    def __init__(self, n_heads: int, repeats: int, d_key: int, d_value: int, chunk: int) -> None:
        super().__init__()
        self.state = [n_heads, d_key, d_value]
        self.repeats = repeats
        self.scale = d_key**-0.5
        self.eps = EPS
        self.chunk = chunk

    def forward(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, context: Context) -> Tensor:
        q, k, v = self.normed(q) * self.scale, self.normed(k), widened(v)
        padding = context.padding
        if padding is not None:  # nothing decays, and nothing is written
            log_decay, beta = log_decay * padding[:, None, :, None], beta * padding[:, None, :, None]
        cache = context.cache
        if cache is None:
            state = v.new_zeros([v.size(0), self.state[0], self.state[1], self.state[2]])
        else:
            state = widened(cache.tensors[1])
        y, state = self.attend(q, k, v, log_decay, beta, state, context.documents)
        if cache is not None:
            cache.tensors[1].copy_(state)
        return y

    def normed(self, x: Tensor) -> Tensor:
        """Norm each head to length 1, and repeat it for each head of values that uses it."""
        x = widened(x)
        x = x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + self.eps)
        return x if self.repeats == 1 else x.repeat_interleave(self.repeats, dim=1)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        state: Tensor,
        documents: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the delta rule in torch or, on CUDA and for rows of one document, by a kernel."""
        if not is_scripting():  # noqa: SIM102  TorchScript skips this `if`, but would compile its condition
            if documents is None and has_kernel("fla", q):
                return fla_delta_rule(q, k, v, log_decay, beta, state)
        return delta_rule(q, k, v, log_decay, beta, state, self.chunk, documents)

    def extra_repr(self) -> str:
        return named(scale=self.scale, repeats=self.repeats, chunk=self.chunk)

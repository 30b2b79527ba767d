"""mLSTM of xLSTM, https://arxiv.org/abs/2405.04517: linear attention with an exponential input gate and a forget gate.

    q, k, v = project(x);  i, f = softcap(rates(x) + biases);  log_a = logsigmoid(f);  m_t = max(log_a_t + m_(t-1), i_t)
    S_t = a_t S_(t-1) + exp(i_t) k_t' [v_t 1];  [y n] = q S / d_key ** 0.5;  h = y / (max(|n|, 1) + eps exp(m))
    output(norm(h) sigmoid(gate(x)))

The last column of the state is the sum of the weighted keys, which normalizes the output. Published code divides the
state by exp(m), so that no exponential overflows. Here the softcap of the gates ensures that, and m only scales `eps`.

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
from tfkit_recurrent.recurrence import EMPTY, linear_attention, running_max, values_of, widened

CHUNK = 64
MAX_SOFTCAP = 40.0
INPUT_BIAS = -10.0
FORGET_BIASES = (3.0, 6.0)


class MLSTMConfig(tfkit.MixerConfig):
    """Linear attention whose heads have an exponential input gate, a forget gate and a normalizer."""

    kind: Literal["mlstm"] = "mlstm"
    free_length = False
    chunk_attributes = ("chunk",)
    restarts = True
    n_heads: tfkit.Count
    """Number of heads."""
    d_key: tfkit.Dim
    """Width of a head of queries and keys."""
    d_value: tfkit.Dim
    """Width of a head of values."""
    gate_softcap: tfkit.PositiveFloat = 15.0
    """Bound of both gates before their exponential or sigmoid: bound * tanh(x / bound)."""
    eps: tfkit.PositiveFloat = 1e-6
    """Term added to the normalizer, relative to the largest weight."""
    output_norm: tfkit.NormConfig = tfkit.slot("layernorm")
    """Norm of the output of each head."""

    def check(self) -> None:
        super().check()
        if self.gate_softcap > MAX_SOFTCAP:
            message = f"`gate_softcap` must be at most {MAX_SOFTCAP:g}; got {self.gate_softcap:g}"
            raise tfkit.Invalid("gate_softcap", message, notes=["the exponential of a larger gate could overflow"])

    @property
    def pattern_sizes(self) -> Mapping[str, int]:
        """Sizes by letter: h heads, d the width of a head of values."""
        return {"h": self.n_heads, "d": self.d_value}

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        state = tfkit.State(self.n_heads, self.d_key, self.d_value + 1, wide=True)
        return (state, tfkit.State(1, 1, self.n_heads, wide=True))

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        """The gates before their biases, the input of the output projection, and the state."""
        gates = {"rates": tfkit.InnerValue("rates", None, f"[b, t, {2 * self.n_heads}]")}
        return {**gates, **values_of(self.cached[:1], self.n_heads * self.d_value)}

    def build(self, make: tfkit.Make) -> nn.Module:
        return MLSTM(self, norm=make(self.output_norm, self.d_value, self.n_heads))


class MLSTM(nn.Module):
    """[b, t, d_model] -> [b, t, d_model].

    The second tensor of the cache, [b, 1, 1, h], is m: the logarithm of the largest weight in the state, at least that
    of a weight of 1 before the first token.
    """

    def __init__(self, config: MLSTMConfig, *, norm: nn.Module) -> None:
        super().__init__()
        keys, values = config.n_heads * config.d_key, config.n_heads * config.d_value
        self.project = Linear(config.d_model, {"q": keys, "k": keys, "v": values}, bias=False)
        self.rates = Linear(config.d_model, {"input": config.n_heads, "forget": config.n_heads}, bias=False)
        self.input_bias = nn.Parameter(torch.empty(config.n_heads))
        self.forget_bias = nn.Parameter(torch.empty(config.n_heads))
        self.norm = norm
        self.gate = Linear(config.d_model, values, bias=False)
        self.output = Linear(values, config.d_model, bias=False, residual=True)
        self.split_keys = Rearrange("b t (h d) -> b h t d", d=config.d_key)
        self.split_values = Rearrange("b t (h d) -> b h t d", d=config.d_value)
        self.split_rates = Rearrange("b t h -> b h t")
        self.merge_heads = Rearrange("b h t d -> b t (h d)")
        self.widths = [keys, keys, values]
        self.scale = config.d_key**-0.5
        self.softcap, self.eps = config.gate_softcap, config.eps
        self.empty = EMPTY
        self.chunk = CHUNK

    def reset_parameters(self) -> None:
        """Fill the biases of the gates: inputs are small at first, and the heads forget at different rates."""
        nn.init.constant_(self.input_bias, INPUT_BIAS)
        with torch.no_grad():
            self.forget_bias.copy_(torch.linspace(*FORGET_BIASES, self.forget_bias.size(0)))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self.project(x).split(self.widths, dim=-1)
        gates = widened(self.rates(x)) + widened(torch.cat((self.input_bias, self.forget_bias)))
        opening, forget = (self.softcap * torch.tanh(gates / self.softcap)).chunk(2, dim=-1)
        y = self.recur(
            widened(self.split_keys(q)) * self.scale,
            widened(self.split_keys(k)),
            widened(self.split_values(v)),
            self.split_rates(opening),
            F.logsigmoid(self.split_rates(forget)),
            context,
        )
        gate = self.gate(x)
        y = self.merge_heads(self.norm(y.to(gate.dtype)))
        return self.output(y * torch.sigmoid(gate))

    def recur(self, q: Tensor, k: Tensor, v: Tensor, opening: Tensor, log_decay: Tensor, context: Context) -> Tensor:
        """Run the recurrence: q and k [b, h, t, d], v [b, h, t, d], opening and log_decay [b, h, t] -> [b, h, t, d]."""
        padding, documents, cache = context.padding, context.documents, context.cache
        if padding is not None:  # nothing decays, and nothing is written
            log_decay, opening = log_decay * padding[:, None], opening.masked_fill(~padding[:, None], self.empty)
        largest = torch.zeros_like(opening[:, :, 0])
        earlier: Tensor | None = None
        if cache is not None:
            earlier, largest = widened(cache.tensors[0][:, :, None]), widened(cache.tensors[1][:, 0, 0])
        k, v = k * opening.exp()[..., None], F.pad(v, [0, 1], value=1.0)
        y, state = linear_attention(q, k, v[:, :, None], log_decay[:, :, None], earlier, self.chunk, documents)
        exponent, largest = running_max(log_decay, opening, largest, self.chunk, documents)
        if cache is not None:
            cache.tensors[0].copy_(state[:, :, 0])
            cache.tensors[1].copy_(largest[:, None, None])
        y, total = y[:, :, 0, :, :-1], y[:, :, 0, :, -1:]
        return y / (total.abs().clamp(min=1.0) + self.eps * exponent.exp()[..., None])

    def extra_repr(self) -> str:
        return named(softcap=self.softcap, eps=self.eps)

"""The recurrent block of Griffin, https://arxiv.org/abs/2402.19427: a gated linear recurrence of each channel.

    x, y = input(x);  x = conv(x);  opening, recurrence = sigmoid(gates(x));  log_a = -8 recurrence softplus(decay)
    h_t = exp(log_a) h_(t-1) + (1 - exp(2 log_a)) ** 0.5 opening x;  output(h activation(y))

The first token of a sequence is written without the factor (1 - exp(2 log_a)) ** 0.5, since it meets an empty state.

b batch, t positions, c d_inner, h blocks, i and o channels of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.nn import Context, Linear, Rearrange, StackedLinear
from tfkit_recurrent.conv import CausalConv
from tfkit_recurrent.recurrence import continues, linear_scan, values_of, widened

SHARPNESS = 8.0
MIN_DECAY, MAX_DECAY = 0.9, 0.999


class RGLRUConfig(tfkit.MixerConfig):
    """A gated linear recurrence of each channel, after a short convolution."""

    kind: Literal["rg_lru"] = "rg_lru"
    free_length = False
    restarts = True
    d_inner: tfkit.Dim
    """Width of the convolution and of the recurrence."""
    n_blocks: tfkit.Count
    """Number of blocks of channels whose gates are computed independently."""
    size: tfkit.Count = 4
    """Number of tokens that the convolution covers."""
    bias: tfkit.Shared[bool] = True
    """If true, the first and the last linear layer have biases."""
    conv_bias: bool = True
    """If true, the convolution has a bias."""
    activation: tfkit.ActivationConfig = tfkit.slot("gelu")
    """Activation of the branch that multiplies the recurrence."""

    def check(self) -> None:
        super().check()
        if self.d_inner % self.n_blocks:
            message = f"d_inner ({self.d_inner}) must be a multiple of n_blocks ({self.n_blocks})"
            notes = [f"divisors of {self.d_inner}: {tfkit.divisors(self.d_inner)}"]
            raise tfkit.Invalid("n_blocks", message, notes=notes)

    @property
    def pattern_sizes(self) -> Mapping[str, int]:
        """Sizes by letter: h blocks."""
        return {"h": self.n_blocks}

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        state = tfkit.State(1, 1, self.d_inner, wide=True)
        return (tfkit.State(1, self.size - 1, self.d_inner), state, tfkit.State(1, 1, 1))

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        """The numbers that both gates are computed from, the input of the output projection, and the state."""
        shape = f"[b, t, {self.d_inner}]"
        gates = {
            name: tfkit.InnerValue("gates", None, shape, item=i) for i, name in enumerate(("opening", "recurrence"))
        }
        return {**gates, **values_of(self.cached, self.d_inner)}

    def build(self, make: tfkit.Make) -> nn.Module:
        return RGLRU(self, activation=make(self.activation))


class RGLRU(nn.Module):
    """[b, t, d_model] -> [b, t, d_model].

    The third tensor of the cache, [b, 1, 1, 1], is 1 once a sequence has a token.
    """

    def __init__(self, config: RGLRUConfig, *, activation: nn.Module) -> None:
        super().__init__()
        inner = config.d_inner
        self.input = Linear(config.d_model, {"x": inner, "y": inner}, bias=config.bias)
        self.conv = CausalConv(inner, config.size, bias=config.conv_bias)
        self.gates = BlockLinear(inner, config.n_blocks)
        self.decay = nn.Parameter(torch.empty(inner))
        self.activation = activation
        self.output = Linear(inner, config.d_model, bias=config.bias, residual=True)
        self.sharpness = SHARPNESS

    def reset_parameters(self) -> None:
        """Fill `decay` so that the decay at an open gate is from 0.9 to 0.999, uniform in its square."""
        with torch.no_grad():
            square = torch.empty_like(self.decay, dtype=torch.float32).uniform_(MIN_DECAY**2, MAX_DECAY**2)
            rate = -square.log() / (2 * SHARPNESS)
            self.decay.copy_(rate + torch.log(-torch.expm1(-rate)))  # the inverse of softplus

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, y = self.input(x).chunk(2, dim=-1)
        x = self.conv(x, context, 0)
        opening, recurrence = self.gates(x)
        log_decay = -self.sharpness * torch.sigmoid(widened(recurrence)) * F.softplus(widened(self.decay))
        growth = torch.sqrt(-torch.expm1(2.0 * log_decay))
        growth = torch.where(self.is_first(x, context), 1.0, growth)
        write = growth * torch.sigmoid(widened(opening)) * widened(x)
        padding = context.padding
        if padding is not None:  # nothing decays, and nothing is written
            log_decay, write = log_decay * padding[:, :, None], write * padding[:, :, None]
        decay, documents = log_decay.exp(), context.documents
        if documents is not None:
            decay = decay * continues(documents)[:, :, None]
        states = self.recur(decay, write, context)
        return self.output((states * self.activation(y)).to(y.dtype))

    def is_first(self, x: Tensor, context: Context) -> Tensor:
        """Mark the first token of each sequence, [b or 1, t, 1], and store that the sequence has a token."""
        cache, padding, documents = context.cache, context.padding, context.documents
        if documents is not None:
            return ~continues(documents)[:, :, None]
        first = (torch.arange(x.size(1), device=x.device) == 0)[None, :, None]
        if cache is None:
            return first
        started = cache.tensors[2]
        first = first & (started[:, 0] == 0.0)
        if padding is None:
            started.fill_(1.0)
        else:
            started.masked_fill_(padding.any(dim=1)[:, None, None, None], 1.0)
        return first

    def recur(self, decay: Tensor, write: Tensor, context: Context) -> Tensor:
        """Run the recurrence: [b, t, c] each -> [b, t, c]."""
        cache = context.cache
        if cache is None:
            return linear_scan(decay, write, torch.zeros_like(write[:, 0]))
        states = linear_scan(decay, write, widened(cache.tensors[1][:, 0, 0]))
        cache.tensors[1].copy_(states[:, -1:, None])
        return states


class BlockLinear(StackedLinear):
    """x [b, t, (h i)] -> `opening` and `recurrence`, [b, t, (h o)] each: a matrix for each block of channels."""

    def __init__(self, width: int, n_blocks: int) -> None:
        size = width // n_blocks
        super().__init__(n_blocks, size, {"opening": size, "recurrence": size}, bias=True)
        self.split = Rearrange("b t (h i) -> b t h i", h=n_blocks)
        self.merge = Rearrange("b t h o -> b t (h o)", o={"opening": size, "recurrence": size})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.einsum("b t h i, h o i -> b t h o", self.split(x), self.weight)
        bias = self.bias
        assert bias is not None
        return self.merge(y + bias)

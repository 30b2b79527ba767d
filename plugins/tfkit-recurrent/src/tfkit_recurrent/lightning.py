"""Lightning attention, https://arxiv.org/abs/2501.08313: linear attention whose heads decay at constant rates.

    q, k, v = activation(project(x));  S_t = exp(-slope) S_(t-1) + k_t' v_t;  output(norm(q S) sigmoid(gate(x)))

b batch, t positions, h heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit.nn import Context, Linear, Rearrange
from tfkit_recurrent.kernels import attend
from tfkit_recurrent.recurrence import values_of, widened

CHUNK = 64


class LightningConfig(tfkit.MixerConfig):
    """Linear attention whose heads decay at constant rates."""

    kind: Literal["lightning"] = "lightning"
    free_length = False
    chunk_attributes = ("chunk",)
    restarts = True
    n_heads: tfkit.Count
    """Number of heads."""
    d_head: tfkit.Dim
    """Width of one head."""
    activation: tfkit.ActivationConfig = tfkit.slot("silu")
    """Activation of queries, keys and values."""
    output_norm: tfkit.NormConfig = tfkit.slot("rmsnorm")
    """Norm of the outputs of all heads as one vector."""
    slope_scale: tfkit.Immaterial[tfkit.PositiveFloat] = 1.0
    """Initial decay rates are 2 ** (-8 i / n_heads) for head i, from 1 on, times this; they are not trained."""

    @property
    def pattern_sizes(self) -> Mapping[str, int]:
        """Sizes by letter: h heads, d the width of a head."""
        return {"h": self.n_heads, "d": self.d_head}

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        return (tfkit.State(self.n_heads, self.d_head, self.d_head, wide=True),)

    def table(self, name: str, stored: Tensor, depth: float) -> Tensor:
        """Return a table of the decays of a layer that files of MiniMax store, for blocks of n positions.

        `query_decay` and `key_decay` [h, n, 1] are decays since the start of a block and until its end,
        `diagonal_decay` [1, h, n, n] the decays from column to row. Rates fall with the depth of the layer, to 1e-5.
        """
        position = torch.arange(1, stored.size(-2) + 1, device=stored.device)
        distance = position[:, None] - position
        distances = {"query_decay": position[:, None], "key_decay": position[-1] - position[:, None]}
        distances["diagonal_decay"] = distance.clamp(min=0)[None]
        rates = (1 - depth + 1e-5) * _rates(self.n_heads, stored.device)[:, None, None]
        powers = torch.exp(-rates * distances[name])
        return (powers * (distance >= 0))[None] if name == "diagonal_decay" else powers

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        """The input of the output projection, and the state."""
        return values_of(self.cached, self.n_heads * self.d_head)

    def build(self, make: tfkit.Make) -> nn.Module:
        norm = make(self.output_norm, self.n_heads * self.d_head)
        return Lightning(self, activation=make(self.activation), norm=norm)


def _rates(n_heads: int, device: torch.device) -> Tensor:
    """Return the rates of decay 2 ** (-8 i / n_heads) of heads i, from 1 on."""
    heads = torch.arange(1, n_heads + 1, dtype=torch.float32, device=device)
    return 2.0 ** (-8.0 * heads / n_heads)


class Lightning(nn.Module):
    """[b, t, d_model] -> [b, t, d_model]."""

    def __init__(self, config: LightningConfig, *, activation: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        width = config.n_heads * config.d_head
        self.project = Linear(config.d_model, {"q": width, "k": width, "v": width}, bias=False)
        self.activation = activation
        self.slopes = nn.Parameter(torch.empty(config.n_heads), requires_grad=False)
        self.norm = norm
        self.gate = Linear(config.d_model, width, bias=False)
        self.output = Linear(width, config.d_model, bias=False, residual=True)
        self.split_heads = Rearrange("b t (h d) -> b h t d", d=config.d_head)
        self.merge_heads = Rearrange("b h t d -> b t (h d)")
        self.slope_scale = config.slope_scale
        self.chunk = CHUNK

    def reset_parameters(self) -> None:
        """Fill the decay rates."""
        with torch.no_grad():
            self.slopes.copy_(self.slope_scale * _rates(self.slopes.size(0), self.slopes.device))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self.activation(self.project(x)).chunk(3, dim=-1)
        q, k = widened(self.split_heads(q)), widened(self.split_heads(k))
        v = widened(self.split_heads(v))[:, :, None]
        log_decay = -widened(self.slopes)[:, None].expand(1, -1, x.size(1))
        padding = context.padding
        if padding is not None:  # nothing decays, and nothing is written
            log_decay, k = log_decay * padding[:, None], k * padding[:, None, :, None]
        y = self.merge_heads(self.recur(q, k, v, log_decay[:, :, None], context)[:, :, 0])
        gate = self.gate(x)
        return self.output((self.norm(y.to(gate.dtype)) * torch.sigmoid(widened(gate))).to(gate.dtype))

    def recur(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, context: Context) -> Tensor:
        """Run the recurrence: q and k [b, h, t, d], v [b, h, 1, t, d], log_decay [b, h, 1, t] -> [b, h, 1, t, d]."""
        cache = context.cache
        earlier: Tensor | None = None
        if cache is not None:
            earlier = widened(cache.tensors[0][:, :, None])
        y, state = attend(q, k, v, log_decay, earlier, self.chunk, context.documents)
        if cache is not None:
            cache.tensors[0].copy_(state[:, :, 0])
        return y

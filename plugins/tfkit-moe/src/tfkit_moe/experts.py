"""The experts: many feed-forward networks of the same shape, each for the tokens that are routed to it.

Tokens are sorted by expert, so the tokens of an expert are adjacent; `stacked.py` multiplies them. In compiled code,
shapes must not depend on data: without the grouped kernel, every expert takes every token, and tokens that are not
routed to it have the weight 0. This costs e / a times as much.

The clamped gate: https://arxiv.org/abs/2508.10925.

s tokens, e experts, a experts of one token, (s a) rows: one for each token and expert of it, m d_model, f d_ff.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tfkit.nn import Linear, Rearrange, is_scripting, named, settings
from tfkit_moe.stacked import ExpertLinear, takes_grouped


class Gate(nn.Module):
    """activation(gate) * up of [..., 2 width], gate first -> [..., width]."""

    extra_repr = settings

    def __init__(self, activation: nn.Module, *, limit: float | None, up_offset: int) -> None:
        super().__init__()
        self.activation = activation
        self.limit = limit
        self.up_offset = up_offset

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = torch.clamp(gate, max=self.limit), torch.clamp(up, -self.limit, self.limit)
        if self.up_offset:
            up = up + self.up_offset
        return self.activation(gate) * up


class Experts(nn.Module):
    """Tokens [s, m], indices and weights of their experts [s, a] -> the weighted sum of the experts' outputs.

    Args:
        activation: between the two layers of an expert; a `Gate`, or anything that keeps the shape.
        n: number of experts.
        per_token: number of experts that a token goes through.
        d_model: width of the tokens.
        d_ff: width of the hidden layer of one expert.
        bias: if true, the layers have biases.
        weighs_input: if true, weights multiply the input of an expert, not its output.
    """

    def __init__(
        self,
        activation: nn.Module,
        *,
        n: int,
        per_token: int,
        d_model: int,
        d_ff: int,
        bias: bool,
        weighs_input: bool,
    ) -> None:
        super().__init__()
        gated = isinstance(activation, Gate)
        self.num_experts = n
        self.weighs_input = weighs_input
        self.merge_rows = Rearrange("s a -> (s a)")
        self.by_expert = Rearrange("s e -> e s 1")
        self.widths = (d_model, d_ff, 2 * d_ff if gated else d_ff)
        gate_up = {"gate": d_ff, "up": d_ff}
        self.gate_up = ExpertLinear(n, d_model, gate_up, bias=bias, per_token=per_token) if gated else None
        self.up = None if gated else ExpertLinear(n, d_model, d_ff, bias=bias, per_token=per_token)
        self.activation = activation
        self.down = ExpertLinear(n, d_ff, d_model, bias=bias, residual=True, per_token=per_token)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if not is_scripting():  # noqa: SIM102  TorchScript skips this `if`, but would compile its condition
            if torch.compiler.is_compiling() and not takes_grouped(x, self.widths):
                return self.every(x, chosen, weights)
        experts, order = torch.sort(self.merge_rows(chosen), stable=True)
        ends = torch.searchsorted(experts, torch.arange(self.num_experts, device=x.device), right=True)
        rows = x.index_select(0, order // chosen.size(1))
        if self.weighs_input:
            rows = rows * self.merge_rows(weights).index_select(0, order).unsqueeze(-1).to(x.dtype)
        rows = self.down(self.activation(self.first(rows, experts, ends)), experts, ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.size(0), device=x.device))
        out = rows.index_select(0, back).view(chosen.size(0), chosen.size(1), rows.size(1))
        if not self.weighs_input:
            out = out * weights.unsqueeze(-1)
        return out.sum(dim=1).to(rows.dtype)

    def first(self, x: Tensor, experts: Tensor | None, ends: Tensor | None) -> Tensor:
        """Apply the layer that takes the tokens."""
        if self.gate_up is not None:
            return self.gate_up(x, experts, ends)
        else:  # noqa: RET505  TorchScript does not compile the other branch of a test for None
            assert self.up is not None
            return self.up(x, experts, ends)

    def every(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute `forward` with every expert for every token."""
        none = weights.new_zeros(x.size(0), self.num_experts)
        share = self.by_expert(none.scatter(1, chosen, weights))
        if self.weighs_input:
            x = x * share.to(x.dtype)
            share = self.by_expert(none.scatter(1, chosen, 1.0))
        out = self.down(self.activation(self.first(x, None, None)), None, None)
        return (out * share).sum(dim=0).to(out.dtype)

    def extra_repr(self) -> str:
        return named(weighs_input=self.weighs_input)


class SharedExperts(nn.Module):
    """Experts that every token goes through: one dense feed-forward network, [s, m] -> [s, m].

    Args:
        activation: between the two layers; a `Gate`, or anything that keeps the shape.
        norms: of the tokens, and of the result; None for no norm.
        d_model: width of the tokens.
        d_ff: width of the hidden layer.
        bias: if true, the layers have biases.
    """

    def __init__(
        self,
        activation: nn.Module,
        *,
        norms: tuple[nn.Module | None, nn.Module | None],
        d_model: int,
        d_ff: int,
        bias: bool,
    ) -> None:
        super().__init__()
        self.norm_in, self.norm_out = norms
        gated = isinstance(activation, Gate)
        self.gate_up = Linear(d_model, {"gate": d_ff, "up": d_ff}, bias=bias) if gated else None
        self.up = None if gated else Linear(d_model, d_ff, bias=bias)
        self.activation = activation
        self.down = Linear(d_ff, d_model, bias=bias, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_in is not None:
            x = self.norm_in(x)
        if self.gate_up is not None:
            hidden = self.gate_up(x)
        else:
            assert self.up is not None
            hidden = self.up(x)
        out = self.down(self.activation(hidden))
        return out if self.norm_out is None else self.norm_out(out)

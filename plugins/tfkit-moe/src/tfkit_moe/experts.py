"""The experts: many feed-forward networks of one shape, each for the tokens that chose it.

Tokens are sorted by expert, so that those of one expert lie together. Three ways to go on, the same numbers:

- `torch.nn.functional.grouped_mm`, one call for all experts, wherever torch has it for the type, the widths and the
  device: without torch.compile on the CPU, and in bfloat16 also on CUDA and compiled.
- One after the other, each expert with its own tokens: scripted, and where the kernel does not serve. On a GPU that
  waits once for where the tokens of each expert end.
- Every expert for every token, with weights of zero: compiled in other types, where no shape may depend on data. It
  costs e / k times as much.

On the meta device no token knows its experts: there every expert has as many, as a router that balances them would have
it, so that what is counted there is what it costs.

The clamped gate: https://arxiv.org/abs/2508.10925.

n tokens, e experts, k experts of a token, r = n k rows: one for each token and expert of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.nn import Linear, StackedLinear, is_scripting, linear

# What `grouped_mm` takes: types, and the bytes that a row must be a multiple of.
ANYWHERE = (torch.bfloat16,)
EAGERLY_ON_THE_CPU = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 16


class Gate(nn.Module):
    """activation(gate) * up of [..., 2 width], gate first -> [..., width]."""

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
    """Tokens [n, d_model], weights and indices of their experts [n, k] -> the weighted sum of what these return.

    Args:
        activation: between the two layers of an expert; a `Gate`, or anything that keeps the shape.
        n: number of experts.
        per_token: how many of them a token goes through.
        d_model: width of the tokens.
        d_ff: width of the hidden layer of one expert.
        bias: whether the layers have biases.
        weighs_input: weights multiply what an expert reads, not what it returns.
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
        self.n = n
        self.weighs_input = weighs_input
        gate_up = {"gate": d_ff, "up": d_ff}
        self.gate_up = StackedLinear(n, d_model, gate_up, bias=bias, per_token=per_token) if gated else None
        self.up = None if gated else StackedLinear(n, d_model, d_ff, bias=bias, per_token=per_token)
        self.activation = activation
        self.down = StackedLinear(n, d_ff, d_model, bias=bias, residual=True, per_token=per_token)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        if not is_scripting():  # noqa: SIM102  TorchScript skips this `if`, but would compile its condition
            if torch.compiler.is_compiling() and not self.takes_grouped(x):
                return self.every(x, weights, chosen)
        k = chosen.size(1)
        experts, order = torch.sort(chosen.flatten(), stable=True)
        ends = torch.searchsorted(experts, torch.arange(self.n, device=x.device), right=True)
        rows = x.index_select(0, order // k)
        if self.weighs_input:
            rows = rows * weights.flatten().index_select(0, order).unsqueeze(-1).to(x.dtype)
        rows = self.run(rows, experts, ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.size(0), device=x.device))
        out = rows.index_select(0, back).unflatten(0, [-1, k])
        if not self.weighs_input:
            out = out * weights.unsqueeze(-1)
        return out.sum(dim=1).to(rows.dtype)

    def first(self) -> tuple[Tensor, Tensor | None]:
        """Weight [e, d_hidden, d_model] and bias [e, d_hidden] of the layer that reads the tokens."""
        if self.gate_up is not None:
            return self.gate_up.weight, self.gate_up.bias
        else:  # noqa: RET505  what stands in the other branch of a None is not compiled by TorchScript
            assert self.up is not None
            return self.up.weight, self.up.bias

    def run(self, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """What the experts return for rows [r, d_model] that are sorted by expert.

        `experts` [r] are those of the rows, `ends` [e] where the rows of each expert end.
        """
        if not is_scripting():
            if rows.is_meta:
                return self.evenly(rows)
            if self.takes_grouped(rows):
                return self.grouped(rows, experts, ends)
        return self.one_by_one(rows, ends)

    def evenly(self, rows: Tensor) -> Tensor:
        """`run` where the experts are not known: each gets as many rows, and the first ones one more."""
        weight, bias = self.first()
        each, more = divmod(rows.size(0), self.n)
        pieces: list[Tensor] = []
        for n, size in ((self.n * (each > 0), each), (more, 1)):
            if n > 0:
                own = rows[: n * size].unflatten(0, [n, size])
                hidden = self.activation(_stacked(own, weight[:n], None if bias is None else bias[:n]))
                last = None if self.down.bias is None else self.down.bias[:n]
                pieces.append(_stacked(hidden, self.down.weight[:n], last).flatten(0, 1))
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def one_by_one(self, rows: Tensor, ends: Tensor) -> Tensor:
        """`run`, expert by expert."""
        weight, bias = self.first()
        # Unbound as a whole: the gradient of a single one would be as large as all of them together.
        ups, up_biases = weight.unbind(), _unbound(bias)
        downs, down_biases = self.down.weight.unbind(), _unbound(self.down.bias)
        pieces: list[Tensor] = []
        bounds: list[int] = ends.tolist()
        start = 0
        for expert, end in enumerate(bounds):
            if end > start:
                hidden = self.activation(linear(rows[start:end], ups[expert], _at(up_biases, expert)))
                pieces.append(linear(hidden, downs[expert], _at(down_biases, expert)))
            start = end
        return torch.cat(pieces) if pieces else rows

    def takes_grouped(self, x: Tensor) -> bool:
        """Whether `grouped` serves."""
        if x.is_meta or not hasattr(F, "grouped_mm"):
            return False
        if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
            return False
        dtype = _computed_in(x)
        if dtype not in (ANYWHERE if x.is_cuda or torch.compiler.is_compiling() else EAGERLY_ON_THE_CPU):
            return False
        widths = (*self.first()[0].shape[1:], self.down.weight.size(2))
        return all(width * dtype.itemsize % ALIGNMENT == 0 for width in widths)

    def grouped(self, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """`run`, by one kernel for all experts."""
        hidden = self.activation(_grouped(rows, *self.first(), experts, ends))
        return _grouped(hidden, self.down.weight, self.down.bias, experts, ends)

    def every(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """What `forward` computes, by every expert for every token."""
        none = weights.new_zeros(x.size(0), self.n)
        share = none.scatter(1, chosen, weights).t().unsqueeze(-1)
        if self.weighs_input:
            x = x * share.to(x.dtype)
            share = none.scatter(1, chosen, 1.0).t().unsqueeze(-1)
        out = _stacked(self.activation(_stacked(x, *self.first())), self.down.weight, self.down.bias)
        return (out * share).sum(dim=0).to(out.dtype)


class SharedExperts(nn.Module):
    """What every token goes through: one dense feed-forward network, [n, d_model] -> the same."""

    def __init__(self, activation: nn.Module, *, d_model: int, d_ff: int, bias: bool) -> None:
        super().__init__()
        gated = isinstance(activation, Gate)
        self.gate_up = Linear(d_model, {"gate": d_ff, "up": d_ff}, bias=bias) if gated else None
        self.up = None if gated else Linear(d_model, d_ff, bias=bias)
        self.activation = activation
        self.down = Linear(d_ff, d_model, bias=bias, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up is not None:
            hidden = self.gate_up(x)
        else:
            assert self.up is not None
            hidden = self.up(x)
        return self.down(self.activation(hidden))


def _grouped(rows: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, ends: Tensor) -> Tensor:
    """Each of the rows [r, d_in] times the matrix of its expert -> [r, d_out]. Autocast does not know the kernel."""
    dtype = _computed_in(rows)
    out = F.grouped_mm(rows.to(dtype), weight.to(dtype).transpose(1, 2), offs=ends.to(torch.int32))
    return out if bias is None else out + bias.to(dtype).index_select(0, experts)


def _stacked(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """All rows [n, d_in], or those of each expert [e, n, d_in], times every matrix -> [e, n, d_out]."""
    out = x @ weight.transpose(1, 2)
    return out if bias is None else out + bias.unsqueeze(1).to(out.dtype)


def _computed_in(x: Tensor) -> torch.dtype:
    """The type in which a linear layer would compute."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _unbound(bias: Tensor | None) -> list[Tensor]:
    found: list[Tensor] = []
    if bias is not None:
        found = list(bias.unbind())
    return found


def _at(biases: list[Tensor], expert: int) -> Tensor | None:
    return biases[expert] if len(biases) > 0 else None

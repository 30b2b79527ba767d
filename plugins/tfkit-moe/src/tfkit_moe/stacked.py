"""A linear layer of all experts: rows are sorted by expert, and multiplied by the matrix of their expert.

Three implementations compute the same numbers:

- `torch.nn.functional.grouped_mm`, a single call for all experts, if torch supports the dtype, the widths and the
  device: without torch.compile on the CPU, and in bfloat16 also on CUDA and compiled.
- A product for each expert with its rows: in scripted code, and if the kernel is not supported. A GPU is synchronized
  once, to read where the rows of each expert end.
- The product of every row and every matrix, if the rows are not sorted.

On the meta device, the experts of rows are unknown. Rows are then divided equally, as by a router that balances the
load, so that the counted costs are realistic.

s tokens, a experts of one token, (s a) rows, e experts, i and o widths of an expert's input and output.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tfkit.nn import StackedLinear, is_scripting, linear

# Requirements of `grouped_mm`: the dtypes, and the alignment of a row in bytes.
ANYWHERE = (torch.bfloat16,)
EAGERLY_ON_THE_CPU = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 16


class ExpertLinear(StackedLinear):
    """Rows [s a, i] sorted by expert, their experts [s a], and the ends of the rows of each expert [e] -> [s a, o].

    Without `experts` and `ends`, all tokens [s, i], or the tokens of each expert [e, s, i], times every matrix ->
    [e, s, o].

    Adapters and hooks that change the weights or the output work with every implementation.
    """

    def forward(self, x: Tensor, experts: Tensor | None, ends: Tensor | None) -> Tensor:
        if experts is None or ends is None:
            return _stacked(x, self.weight, self.bias)
        if not is_scripting():
            if x.is_meta:
                return self.evenly(x)
            if takes_grouped(x, self.weight.shape[1:]):
                return _grouped(x, self.weight, self.bias, experts, ends)
        return self.one_by_one(x, ends)

    def evenly(self, rows: Tensor) -> Tensor:
        """Multiply rows of unknown experts: rows are divided equally, and the first experts get the remaining rows."""
        each, more = divmod(rows.size(0), self.weight.size(0))
        outputs: list[Tensor] = []
        for n, size in ((self.weight.size(0) * (each > 0), each), (more, 1)):
            if n > 0:
                chunk = rows[: n * size].unflatten(0, [n, size])
                outputs.append(
                    _stacked(chunk, self.weight[:n], None if self.bias is None else self.bias[:n]).flatten(0, 1)
                )
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def one_by_one(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows [s a, i] sorted by expert -> [s a, o], expert by expert."""
        # Unbind all matrices together: the gradient of a single index would be as large as all matrices.
        weights, biases = self.weight.unbind(), _unbound(self.bias)
        outputs: list[Tensor] = []
        bounds: list[int] = ends.tolist()
        start = 0
        for expert, end in enumerate(bounds):
            if end > start:
                outputs.append(linear(rows[start:end], weights[expert], _at(biases, expert)))
            start = end
        return torch.cat(outputs) if outputs else rows.new_empty([0, self.weight.size(1)])


def takes_grouped(x: Tensor, widths: tuple[int, ...]) -> bool:
    """Return True if the grouped kernel supports rows like x for layers of these widths."""
    if x.is_meta or not hasattr(F, "grouped_mm"):
        return False
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    dtype = _computed_in(x)
    if dtype not in (ANYWHERE if x.is_cuda or torch.compiler.is_compiling() else EAGERLY_ON_THE_CPU):
        return False
    return all(width * dtype.itemsize % ALIGNMENT == 0 for width in widths)


def _grouped(rows: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, ends: Tensor) -> Tensor:
    """Multiply each of the rows [s a, i] by the matrix of its expert -> [s a, o]. Autocast ignores the kernel."""
    dtype = _computed_in(rows)
    out = F.grouped_mm(rows.to(dtype), weight.to(dtype).mT, offs=ends.to(torch.int32))
    return out if bias is None else out + bias.to(dtype).index_select(0, experts)


def _stacked(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply all tokens [s, i], or the tokens of each expert [e, s, i], by every matrix -> [e, s, o]."""
    out = x @ weight.mT
    return out if bias is None else out + bias.unsqueeze(1).to(out.dtype)


def _computed_in(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer would compute."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _unbound(bias: Tensor | None) -> list[Tensor]:
    biases: list[Tensor] = []
    if bias is not None:
        biases = list(bias.unbind())
    return biases


def _at(biases: list[Tensor], expert: int) -> Tensor | None:
    return biases[expert] if len(biases) > 0 else None

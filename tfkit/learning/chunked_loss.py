"""Cross-entropy over logits that are never all in memory: in chunks of rows, forward and backward together.

The gradients of a chunk are computed while its logits exist. Nothing is computed twice, and no tensor with the size of
all logits is saved. https://github.com/linkedin/Liger-Kernel does so for a linear head; this module supports any head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

TARGET_CHUNKS = 8
"""Target number of chunks. More chunks take more time, because each chunk adds to the full gradient of the head."""
MIN_LOGITS = 2**25
"""Minimum number of logits in a chunk: smaller chunks cost time and save little memory."""
MAX_ROWS = 4096
"""Maximum number of rows in a chunk: larger chunks save no time."""


def chunk_count(n_rows: int, vocab_size: int) -> int:
    """Return the number of chunks for `n_rows` rows of logits."""
    rows = min(max(n_rows // TARGET_CHUNKS, MIN_LOGITS // vocab_size), MAX_ROWS)
    return max(1, -(-n_rows // max(rows, 1)))


class ChunkedLoss:
    """The summed cross-entropy of a head's logits, in chunks.

    n rows, d width, v vocabulary.

    Args:
        head: [n, d] -> logits [n, v]; computes each row independently.
        extra: additional arguments of the head, which are weights of other modules.
        options: options of `torch.nn.functional.cross_entropy`.
        z: the weight of the square of each row's log-sum-exp.
    """

    def __init__(
        self, head: nn.Module, extra: Mapping[str, Tensor], options: Mapping[str, Any], z: float = 0.0
    ) -> None:
        self.head, self.extra, self.options, self.z = head, extra, options, z
        self.parameters = dict(head.named_parameters())
        self.weights = [*self.parameters.values(), *extra.values()]

    def __call__(self, rows: Tensor, targets: Tensor, chunks: int) -> Tensor:
        """Return the sum over all rows, in float32 or wider; `rows` [n, d], `targets` [n]."""
        values = [rows, *self.weights]
        learned = [i for i, value in enumerate(values) if value.requires_grad] if torch.is_grad_enabled() else []
        with torch.no_grad():
            total, gradients = self._walk(rows, targets, chunks, learned)
        if not learned:
            return total
        return _WithGradients.apply(total, len(learned), *gradients, *[values[i] for i in learned])

    def _walk(self, rows: Tensor, targets: Tensor, chunks: int, learned: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and its gradients with respect to the learned values (rows: 0, weights: from 1)."""
        weights = [_leaf_view(weight, i in learned) for i, weight in enumerate(self.weights, 1)]
        gradients = [torch.zeros_like(weights[i - 1], dtype=_sum_dtype(weights[i - 1].dtype)) for i in learned if i > 0]
        total = rows.new_zeros((), dtype=_sum_dtype(rows.dtype))
        of_rows: list[Tensor] = []
        for start, end in self._ranges(rows, chunks):
            values = [_leaf_view(rows[start:end], 0 in learned), *weights]
            loss, of_piece = self._add_piece(gradients, values, targets[start:end], learned)
            total = total + loss
            of_rows += of_piece
        return total, [self._joined(of_rows), *gradients] if of_rows else gradients

    def _ranges(self, rows: Tensor, chunks: int) -> Iterable[tuple[int, int]]:
        """Return the range of rows of each chunk."""
        # `split` would make each length another graph.
        return pairwise([rows.size(0) * i // chunks for i in range(chunks + 1)])

    def _joined(self, of_rows: Sequence[Tensor]) -> Tensor:
        """Return the gradients of all rows from the gradients of each chunk."""
        return torch.cat([*of_rows])

    def _add_piece(
        self, totals: Sequence[Tensor], values: Sequence[Tensor], targets: Tensor, learned: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Add the gradients of the weights in place to `totals`; return the loss and the rows' gradient."""
        loss, gradients = self._gradients(values, targets, learned)
        n = len(gradients) - len(totals)
        for of_all, of_piece in zip(totals, gradients[n:], strict=True):
            of_all.add_(of_piece)
        return loss, gradients[:n]

    def _gradients(
        self, values: Sequence[Tensor], targets: Tensor, learned: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of one chunk, and its gradients with respect to the learned values."""
        if not learned:
            return self._loss(targets, *values), []
        if torch.compiler.is_compiling():  # it cannot trace `autograd.grad`, which takes less memory
            both = torch.func.grad_and_value(partial(self._loss, targets), argnums=tuple(learned))
            gradients, loss = both(*values)
            return loss, list(gradients)
        with torch.enable_grad():
            loss = self._loss(targets, *values)
        return loss.detach(), list(torch.autograd.grad(loss, [values[i] for i in learned], materialize_grads=True))

    def _loss(self, targets: Tensor, rows: Tensor, *weights: Tensor) -> Tensor:
        n = len(self.parameters)
        parameters = dict(zip(self.parameters, weights[:n], strict=True))
        # Views, because torch's operation counters hook the arguments of a module, and cannot hook leaves here.
        extra = {name: weight.view_as(weight) for name, weight in zip(self.extra, weights[n:], strict=True)}
        logits = functional_call(self.head, parameters, (rows.view_as(rows),), extra)
        logits = logits.to(_sum_dtype(logits.dtype))
        loss = F.cross_entropy(logits, targets, reduction="sum", **self.options)
        if not self.z:
            return loss
        counted = targets != self.options["ignore_index"]
        return loss + self.z * logits.logsumexp(-1).square().mul(counted).sum()


def _leaf_view(tensor: Tensor, learned: bool) -> Tensor:
    """Return a view of the same memory with a separate gradient.

    The hooks of a parameter must run once, with the gradient of all chunks.
    """
    alone = tensor.detach()
    return alone if torch.compiler.is_compiling() else alone.requires_grad_(learned)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: in half precision, sums over many chunks would lose digits."""
    return torch.promote_types(dtype, torch.float32)


class _WithGradients(torch.autograd.Function):
    """A number whose gradients are known: (total, n, n gradients, n tensors) -> total."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, n: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[:n])
        ctx.dtypes = [tensor.dtype for tensor in tensors[n:]]
        return total.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("the loss in chunks has no second derivative: compute the loss from the model's logits")
        gradients = [
            (gradient * outer).to(dtype) for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return None, None, *[None] * len(gradients), *gradients

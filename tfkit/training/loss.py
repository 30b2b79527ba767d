"""The loss of a model whose vocabulary is large, without its logits as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.training.pieces import PiecewiseLoss, count_pieces
from tfkit.training.trunk import find_ends, trained, write_trunk
from tfkit.wrapped import called, is_sharded

Inputs: TypeAlias = Tensor | Mapping[str, Tensor | None]
Reduction: TypeAlias = Literal["mean", "sum"]


class Read(NamedTuple):
    """What a model has made of its inputs when its head is reached.

    Attributes:
        hidden: what the head reads: [b, t, width], or [b, width] where it reads one vector for a sequence.
        mask: its padding mask, [b, t], if there is one.
        tokens: of the same positions, [b, t], if there are such.
        given: what the head is given beside it.
    """

    hidden: Tensor
    mask: Tensor | None
    tokens: Tensor | None
    given: Mapping[str, Any]


class Loss(nn.Module):
    """The cross-entropy of a built model as a module: what a training loop calls, compiles or distributes.

        loss = tfkit.Loss(model)
        loss(tokens).backward()

    It equals `F.cross_entropy` of the model's logits in value and gradients, but makes the logits piece by piece and,
    with each piece, the gradients of what the head reads and of its weights, which it keeps until `backward`. It is
    float32 where the model is narrower. `torch.compile(loss)` has no graph break; with `pieces` given it does not
    depend on the number of tokens. The model is not called itself but its nodes, so that its own hooks do not run:
    compile, or wrap for distributed training, the loss instead (`docs/around.md`).

    b batch, t length.

    Args:
        model: what `tfkit.build` returned; it returns logits, from a head that computes every position alone.
        ignore_index: the target that is none: the position does not count.
        label_smoothing: the share of every target that is spread evenly over the vocabulary.
        reduction: the mean over the positions that count; or their sum, where batches of unequal size form one step.
        pieces: how many; enough that the logits take little memory, unless given. More take less memory, and longer.

    Raises:
        ValueError: the model was not built by tfkit or is wrapped, does not return logits or returns more than them;
            an argument is out of its range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        pieces: int | None = None,
    ) -> None:
        super().__init__()
        if pieces is not None and pieces < 1:
            raise ValueError(f"pieces ({pieces}) must be positive")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is 'mean' or 'sum', not {reduction!r}")
        self.model = model = trained(model)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.pieces = pieces
        self._ends = find_ends(model)
        self._trunk = write_trunk(model, self._ends)

    def forward(self, inputs: Inputs, targets: Tensor | None = None) -> Tensor:
        """The loss, a scalar.

        Args:
            inputs: tokens [b, t]; or everything that the model takes, by name, such as `source`, `target` and
                `target_mask`.
            targets: what each position shall predict: ids, [b, t], or [b] where the head reads one vector for a
                sequence. The next token unless given. What the padding mask hides does not count, neither as a
                position nor as a next token.

        Raises:
            ValueError: targets are missing and the model may have read the next tokens, or have another shape; or
                `torch.func` transforms it.
        """
        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
            raise ValueError("torch.func cannot follow this loss: take `F.cross_entropy` of the model's logits")
        return called(self.model, lambda: self.of(self.read(inputs), targets))

    def read(self, inputs: Inputs) -> Read:
        """Run the model up to its head."""
        found = self._trunk(self.model, inputs) if isinstance(inputs, Tensor) else self._trunk(self.model, **inputs)
        return Read(*found)

    def of(self, read: Read, targets: Tensor | None = None) -> Tensor:
        """The loss of what was read; targets and errors as of `forward`."""
        hidden, mask, tokens, given = read
        targets = self._targets(tokens, mask) if targets is None else targets
        if targets.shape != hidden.shape[:-1]:
            wanted, found = tuple(hidden.shape[:-1]), tuple(targets.shape)
            raise ValueError(f"targets are {found}, and the head reads {wanted} positions")
        if mask is not None:
            targets = targets.masked_fill(~mask, self.ignore_index)
        options = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        head = PiecewiseLoss(self._head(), given, options)
        rows = hidden.flatten(0, -2)
        total = head(rows, targets.flatten().long(), self.pieces or count_pieces(rows.size(0), self._ends.vocab_size))
        return total if self.reduction == "sum" else total / (targets != self.ignore_index).sum()

    def _head(self) -> nn.Module:
        head = self.model.get_submodule(self._ends.head)
        if not torch.compiler.is_compiling() and is_sharded(head):
            raise ValueError(f"`{self._ends.head}` is sharded by itself: leave it to the root, `fully_shard(model)`")
        return head

    def _targets(self, tokens: Tensor | None, mask: Tensor | None) -> Tensor:
        """The next token of each position; the last one has none."""
        if tokens is None:
            raise ValueError("targets are missing: the model may have read the next tokens, or does not read any")
        if mask is not None:
            tokens = tokens.masked_fill(~mask, self.ignore_index)
        return F.pad(tokens[:, 1:], (0, 1), value=self.ignore_index)


def loss(
    model: nn.Module,
    inputs: Inputs,
    targets: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    pieces: int | None = None,
) -> Tensor:
    """`Loss(model, ...)(inputs, targets)` for a single step; a compiled or a distributed one makes a `Loss`."""
    made = Loss(model, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction, pieces=pieces)
    value: Tensor = made(inputs, targets)
    return value

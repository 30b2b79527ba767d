"""The state of a run between two steps, as tensors by name and JSON data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from tfkit.nn import part

SEPARATOR = "/"
"""Separator between the name of a parameter and the name of a tensor of its optimizer state."""


@dataclass(frozen=True)
class Checkpoint:
    """State of a run between two steps.

    It contains no random generator, because each step derives its random numbers from the seed and the step number.
    """

    step: int
    """Number of completed updates."""
    model: fx.GraphModule
    """The model with its weights."""
    optimizer: Mapping[str, Tensor]
    """The optimizer's tensors, `PARAMETER/NAME`."""
    callbacks: tuple[Mapping[str, Any], ...]
    """The state of each callback."""
    ended: str | None = None
    """The reason why no step follows; None if one does."""
    skipped: int = 0
    """Steps without an update."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """The tensors of callbacks, `NUMBER/NAME`."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint that has been read; see `Checkpoint`."""

    step: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    callbacks: tuple[Mapping[str, Any] | None, ...]
    """The state of each callback of the run; None for a callback that begins without a state."""
    ended: str | None
    skipped: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    branch: bool = False
    """True if the checkpoint belongs to the run that this run branches from."""


class Record(Protocol):
    """The store of a run: its metrics, texts and checkpoints."""

    def restored(self, model: fx.GraphModule) -> Restored | None:
        """Read the latest checkpoint, or the checkpoint that a branch starts from; return None without either.

        Files do not change.

        Raises SpecError if the checkpoint cannot be read completely, or does not fit the run and its model.
        """

    def resume(self) -> None:
        """Remove everything that was recorded after the checkpoint of `restored`; entries follow."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step, or of an evaluation after it."""

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text."""

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, completely or not at all."""

    def saving(self) -> Callable[[Checkpoint], None]:
        """Return a function that writes a checkpoint of this step. It may run in any thread, and after later steps."""

    def shards(self) -> AbstractContextManager[Path]:
        """Yield an empty folder for the shards of a checkpoint, which exists until the context ends."""

    def save_model(self, name: str, model: fx.GraphModule) -> None:
        """Write a model to the folder `name` in the folder of the run, completely or not at all."""

    def close(self) -> None:
        """Write pending entries, and close the files."""


def optimizer_tensors(model: fx.GraphModule, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state tensors of an optimizer by the names of the parameters."""
    # After a forward, a sharded model may have complete weights in place of its parameters; this puts the parts back.
    model.state_dict()
    return {
        f"{name}{SEPARATOR}{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }


def restore(model: fx.GraphModule, optimizer: torch.optim.Optimizer, restored: Restored) -> None:
    """Set a model and its optimizer to a checkpoint that fits them. Tensors are copied, so files may be removed."""
    state = model.state_dict()
    model.load_state_dict({name: part(tensor, state[name]) for name, tensor in restored.weights.items()})
    parameters = dict(model.named_parameters())
    for path, tensor in restored.optimizer.items():
        name, _, key = path.partition(SEPARATOR)
        like = parameters[name]
        tensor = tensor.to(like.device, copy=True)
        optimizer.state[like][key] = part(tensor, like) if tensor.shape == like.shape else tensor

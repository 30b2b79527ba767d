"""The state of a run between two steps, as tensors by name and JSON data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from tfkit.checkpoint.files import TensorFiles
from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.nn import part
from tfkit.run.contract import LossConfig
from tfkit.run.run_meaning import content_paths
from tfkit.run.training.adapters import restore_tensors
from tfkit.spec.folder import STATE, TENSORS
from tfkit.spec.header import quoted_path, read_object
from tfkit.spec.weight_files import combined_digest, content_of, tensor_digests
from tfkit.torch_private.sharding import local_part
from tfkit.torch_private.tensors import storage_key, version_of

SEPARATOR = "/"
"""Separator between the name of a parameter and the name of a tensor of its optimizer state."""
MAX_NAMES = 4
"""The maximum number of tensors that an error lists."""
LOSS = "loss"
"""Owner of the tensors of the loss in a checkpoint, next to the numbers of callbacks."""


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
    """The tensors of the loss, `loss/NAME`, and of callbacks, `NUMBER/NAME`."""


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


class RunStore(Protocol):
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
    return {
        f"{name}{SEPARATOR}{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }


def tensors_of_owner(tensors: Mapping[str, Tensor], owner: str | int) -> dict[str, Tensor]:
    """Return the tensors of the loss or of a callback, by their names without the owner."""
    begin = f"{owner}{SEPARATOR}"
    return {name.removeprefix(begin): tensor for name, tensor in tensors.items() if name.startswith(begin)}


def named_for(owner: str | int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by their names in a checkpoint, which begin with the owner: `tensors_of_owner` reverses this."""
    return {f"{owner}{SEPARATOR}{name}": tensor for name, tensor in tensors.items()}


def checked_tensors(
    file: TensorFiles,
    path: Path,
    digest: object,
    digests: Mapping[str, str] | None = None,
    process: tuple[int, int] = (0, 1),
) -> dict[str, Tensor]:
    """Return the tensors of a file; raise SpecError if it was changed after the checkpoint was written.

    With the `digests` of all tensors, this `process`, its rank and the number of processes, checks only its share.
    """
    notes: tuple[str, ...] = ()
    if digests is None:
        is_changed = content_of(path) != digest
    else:
        sizes = {name: math.prod(info.shape) * info.dtype.itemsize for name, info in file.names.items()}
        share = share_of(sizes, *process)
        is_changed = combined_digest(digests) != digest or digests.keys() != sizes.keys()
        actual = {} if is_changed else tensor_digests(path, share)
        if changed := [name for name in actual if actual[name] != digests[name]]:
            is_changed, reader = True, f", read by process {process[0]} of {process[1]}" if process[1] > 1 else ""
            notes = (f"changed: {listing(map(quoted, changed), MAX_NAMES)}{reader}",)
    if is_changed:
        message = f"the tensors in {quoted_path(path)} were changed after the checkpoint was written"
        raise SpecError(Diagnostic(message, notes=notes))
    return {name: file.read(name) for name in file.names}


def share_of(sizes: Mapping[str, int], rank: int, count: int) -> list[str]:
    """Return the tensors that a process checks. The shares of all processes have about as many bytes each."""
    loads = [(0, number) for number in range(count)]
    share = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, number = heappop(loads)
        heappush(loads, (load + sizes[name], number))
        if number == rank:
            share.append(name)
    return share


def loss_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the state of the loss in a checkpoint, empty without a state. Raise SpecError if it was changed."""
    path = folder / TENSORS
    if not path.is_file():
        return {}
    digest = read_object(folder / STATE).get("tensors")
    with TensorFiles.open(path) as file:
        return tensors_of_owner(checked_tensors(file, path, digest), LOSS)


class LossState:
    """The tensors of a loss that a resumed run needs: its parameters and persistent buffers, without the model's.

    A built model in the loss of a config with a `ContentPath` is not part of the state for as long as its values are
    those that `build` read, because the digest of the run covers them.
    """

    def __init__(self, loss: nn.Module, model: fx.GraphModule, config: LossConfig) -> None:
        self._loss, self._model = loss, model
        self._references: dict[str, str] = {}
        """Digests of the tensors of models that `build` read."""
        if any(True for _ in content_paths((), config)):
            built = [f"{path}." for path, module in loss.named_modules() if isinstance(module, fx.GraphModule)]
            state = self._all()
            self._references = {name: _tensor_digest(state[name]) for name in state if name.startswith(tuple(built))}

    def _all(self) -> dict[str, Tensor]:
        state = self._loss.state_dict(keep_vars=True)
        of_model = {id(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}
        return {name: t.detach() for name, t in state.items() if isinstance(t, Tensor) and id(t) not in of_model}

    @property
    def trained(self) -> str | None:
        """The name of a parameter with a gradient that is not the model's; None without such a parameter."""
        of_model = {id(parameter) for parameter in self._model.parameters()}
        named = self._loss.named_parameters()
        return next((name for name, p in named if p.requires_grad and id(p) not in of_model), None)

    def versions(self) -> dict[str, tuple[Tensor, int]]:
        """Return the tensors of the state by name, each with its number of changes in place."""
        return {name: (tensor, version_of(tensor)) for name, tensor in self._all().items()}

    def changed(self, versions: Mapping[str, tuple[Tensor, int]]) -> str | None:
        """Return the name of the first tensor that has changed since `versions`; None if none has."""
        now, before = (
            {name: (_storage_of(tensor), version) for name, (tensor, version) in part.items()}
            for part in (self.versions(), versions)
        )
        return next((name for name in now | before if now.get(name) != before.get(name)), None)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by the names of the loss's tensors."""
        references = self._references
        return {
            name: t
            for name, t in self._all().items()
            if name not in references or references[name] != _tensor_digest(t)
        }

    def digest(self) -> str:
        """Return a digest of the state, which is equal in all processes. Tensors that are sharded do not count."""
        full = {name: tensor for name, tensor in self.tensors().items() if local_part(tensor) is tensor}
        return " ".join(f"{name} {_tensor_digest(tensor)}" for name, tensor in full.items())

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], *, branch: bool) -> None:
        """Set the loss to the state of a checkpoint. Raise ValueError if the loss and the state do not fit.

        The settings of the loss may differ in a `branch`, where a tensor therefore keeps its shape.
        """
        state = self._all()
        if missing := [name for name in state if name not in tensors and name not in self._references]:
            raise ValueError(f"the checkpoint has no `{missing[0]}`")
        device = next(self._model.parameters()).device
        for name, tensor in tensors.items():
            path, _, attribute = name.rpartition(".")
            like, owner = state.get(name), self._loss.get_submodule(path)
            if like is not None and (like.shape, like.dtype) == (tensor.shape, tensor.dtype):
                like.copy_(part(tensor.to(like.device), like))
            elif hasattr(owner, attribute) and (like is None or not branch):  # a buffer that grows, or is None at first
                setattr(owner, attribute, tensor.to(device, copy=True))
            else:
                raise ValueError(f"the loss has no `{name}` of shape {list(tensor.shape)}")


def _storage_of(tensor: Tensor) -> int:
    local = local_part(tensor)
    assert isinstance(local, Tensor)
    return storage_key(local)


def _tensor_digest(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy().data).hexdigest()


def restore_model(model: fx.GraphModule, optimizer: torch.optim.Optimizer, restored: Restored) -> None:
    """Set a model and its optimizer to a checkpoint that fits them. Tensors are copied, so files may be removed."""
    restore_tensors(model, restored.weights)
    parameters = dict(model.named_parameters())
    for path, tensor in restored.optimizer.items():
        name, _, key = path.partition(SEPARATOR)
        optimizer.state[parameters[name]][key] = on_device_of(parameters[name], tensor)


def on_device_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy of a state tensor on the device of its parameter; of a shard, only the rows of this process."""
    rows = part(tensor, parameter) if tensor.shape == parameter.shape else tensor
    return tensor.to(parameter.device, copy=True) if rows is tensor else rows

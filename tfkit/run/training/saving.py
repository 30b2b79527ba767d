"""Checkpoints of several processes, written during training: torch's distributed checkpoint, then merged.

Each process copies its shards, and a thread writes them. The first process then merges the shards with torch, tensor by
tensor, and writes the checkpoint from the resulting file. The checkpoint has the same files as with one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from tfkit.building.builder import graph_of
from tfkit.checkpoint.files import TensorFiles
from tfkit.errors import Diagnostic, SpecError
from tfkit.run.training.adapters import assign_tensors, checkpoint_tensors, outline_of
from tfkit.run.training.checkpoint import Checkpoint, RunStore

WRITE_TIMEOUT = timedelta(hours=4)
"""The longest time for writing a checkpoint, during which the other processes wait for the first process."""


class Saving:
    """The checkpoint that is being written, if any."""

    def __init__(self, from_all: Callable[[Path | None], list[Path | None]], outline: fx.GraphModule | None) -> None:
        self._from_all = from_all
        self._outline = outline
        """A model without values, in the process that writes."""
        # Training has other messages meanwhile, which would mix with those of the checkpoint.
        self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self._last: Future[Any] | None = None

    @classmethod
    def of(cls, model: fx.GraphModule, from_all: Callable[[Any], list[Any]], *, writes: bool) -> Saving:
        return cls(from_all, outline_of(model) if writes else None)

    def begin(
        self, checkpoint: Checkpoint, record: RunStore, gathered: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    ) -> None:
        """Copy the shards of this process, and let threads write them. `gathered` receives the unsharded tensors."""
        self.finish()
        tensors = _by_path(checkpoint)
        parts = {path: tensor for path, tensor in tensors.items() if _is_part(tensor)}
        unsharded = gathered({path: tensor for path, tensor in tensors.items() if path not in parts})
        context = None if self._outline is None else record.shards()
        location = None if context is None else context.__enter__()
        folder = next(path for path in self._from_all(location) if path is not None)
        files = dict.fromkeys(parts, 1)
        writer = HuggingFaceStorageWriter(str(folder), files, save_distributed=True, enable_consolidation=True)
        self._last = written = _as_future(async_save(parts, storage_writer=writer, process_group=self._group))
        if context is not None:
            write, pool = record.saving(), ThreadPoolExecutor(1)
            assert self._outline is not None
            self._outline.meta["graph"] = graph_of(checkpoint.model)  # the values of the model may change by step
            self._last = pool.submit(self._write, written, context, folder, checkpoint, list(tensors), unsharded, write)
            pool.shutdown(wait=False)

    def finish(self) -> None:
        """Wait for the checkpoint. Raise SpecError if a process cannot write its part."""
        last, self._last = self._last, None
        try:
            if last is not None:
                last.result()
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            if isinstance(cause, RuntimeError):  # of a connection
                raise cause from error
            message = f"process {rank} cannot write its part of the checkpoint: {cause}"
            raise SpecError(Diagnostic(message, help="the checkpoint before is complete: continue from it")) from error

    def _write(
        self,
        written: Future[Any],
        context: AbstractContextManager[Path],
        folder: Path,
        checkpoint: Checkpoint,
        paths: list[str],
        unsharded: Mapping[str, Tensor],
        write: Callable[[Checkpoint], None],
    ) -> None:
        """Write the checkpoint, as soon as the folder contains the shards of all processes."""
        assert self._outline is not None
        try:
            written.result()
            with TensorFiles.open(folder) as files:
                named = {path: unsharded[path] if path in unsharded else files.read(path) for path in paths}
                model, optimizer, tensors = (
                    {path[1:]: tensor for path, tensor in named.items() if path[0] == mark} for mark in _MARKS
                )
                assign_tensors(self._outline, model)
                write(replace(checkpoint, model=self._outline, optimizer=optimizer, tensors=tensors))
        finally:
            context.__exit__(None, None, None)


_MARKS = "mos"
"""Prefixes of the names of the model's, the optimizer's and the callbacks' tensors."""


def _by_path(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by unique names."""
    named = (checkpoint_tensors(checkpoint.model), checkpoint.optimizer, checkpoint.tensors)
    return {f"{mark}{name}": t for mark, tensors in zip(_MARKS, named, strict=True) for name, t in tensors.items()}


def _is_part(tensor: Tensor) -> bool:
    """Return True for shards that torch can merge: tensors without an axis would become 0, and integers fail."""
    return isinstance(tensor, DTensor) and tensor.dim() > 0 and tensor.is_floating_point()


def _as_future(saved: Any) -> Future[Any]:
    assert isinstance(saved, Future)
    return saved

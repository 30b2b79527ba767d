"""The interface to the processes that train together, and its implementation for a single process."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.building.builder import build, graph_of
from tfkit.building.placement import device_of
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.run.checked_run import Run
from tfkit.run.contract import Ids
from tfkit.run.training.adapters import assign_tensors, checkpoint_tensors, insert_adapters, outline_of
from tfkit.run.training.checkpoint import Checkpoint, RunStore

COPY = "copy"
"""The key of `model.meta` with a function that builds another model with the same shards."""


class Processes:
    """One process. `tfkit.run.training.parallel.Together` has the same methods for several."""

    rank = 0
    """Rank of this process. Process 0 writes the record."""
    count = 1
    """The number of processes."""
    _writing: Future[None] | None = None
    """The checkpoint that a thread is writing."""
    _outline: fx.GraphModule | None = None
    """A model without values, for the copies of the weights."""

    def device(self, name: str) -> torch.device:
        """Return the device of this process; raise ValueError if there is no device of that name."""
        return device_of(name)

    def build(self, run: Run, device: torch.device) -> fx.GraphModule:
        """Build the model of a run with its initial weights, which are sharded over the processes.

        Raises SpecError if the values of several processes differ.
        """
        model = build(run.graph, device=device, seed=run.config.seed, attention_backend=run.config.machine.attention)
        insert_adapters(model, run)
        return model

    def reshard(self, model: fx.GraphModule) -> None:
        """Free the full parameters that a call of the model without a backward pass leaves in place of the shards."""

    def rows(self, indices: Ids) -> Ids:
        """Return the indices of this process among the indices of a step."""
        return indices

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a number over all processes."""
        return value

    def agreed(self, reason: str | None) -> str | None:
        """Return, in all processes, the reason of the first process that has one; None if none has."""
        return reason

    def check_equal(self, value: str, what: str) -> None:
        """Raise SpecError unless all processes have the same value. `what` describes a process that differs."""

    def total(self, sums: Sequence[Any]) -> list[Any]:
        """Return the sums of all processes, added with `+`."""
        return list(sums)

    def full_model(self, model: fx.GraphModule) -> fx.GraphModule | None:
        """Return the model with its full parameters; None in processes that do not write."""
        return model

    def save(self, checkpoint: Checkpoint, record: RunStore) -> None:
        """Write a checkpoint of this step. On a GPU and with several processes, training continues during the write."""
        self.finish_saving()
        if not is_on_accelerator(checkpoint.model):
            record.save(checkpoint)  # a copy would need three quarters of the memory of a step again
            return
        self._outline = self._outline or outline_of(checkpoint.model)
        write, copied, pool = record.saving(), _copied(checkpoint, self._outline), ThreadPoolExecutor(1)
        self._writing = pool.submit(write, copied)
        pool.shutdown(wait=False)

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is written. Raise SpecError if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait for a checkpoint after training has failed, whose error is raised instead of an error of the write."""
        if self._writing is not None:
            wait([self._writing])


def is_on_accelerator(model: fx.GraphModule) -> bool:
    """Return True if the weights of a model are not in the memory of the CPU."""
    return next(model.parameters()).device.type != "cpu"


def _copied(checkpoint: Checkpoint, outline: fx.GraphModule) -> Checkpoint:
    """Return a copy of a checkpoint in the memory of the CPU, which later steps do not change."""

    def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    outline.meta["graph"] = graph_of(checkpoint.model)  # the values of the model may change by step
    model = assign_tensors(outline, copies(checkpoint_tensors(checkpoint.model)))
    optimizer, tensors = copies(checkpoint.optimizer), copies(checkpoint.tensors)
    callbacks = copy.deepcopy(checkpoint.callbacks)
    return replace(checkpoint, model=model, optimizer=optimizer, tensors=tensors, callbacks=callbacks)


def frozen_copy(model: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a model, without gradients: the teacher that a loss starts from.

    If the model is sharded over processes, the copy is sharded in the same way, which `copy.deepcopy` cannot do. A
    parameter of the copy can therefore be updated from the parameter of the model in place, with any number of
    processes.
    """
    if COPY not in model.meta:
        return copy.deepcopy(model).requires_grad_(False)
    twin: fx.GraphModule = model.meta[COPY]().requires_grad_(False)
    twin.train(model.training)
    with torch.no_grad():
        for to, value in zip(twin.parameters(), model.parameters(), strict=True):
            to.copy_(value)
    return twin


def check_count(run: Run, count: int) -> None:
    """Raise SpecError if `count` processes cannot train a run."""
    shard, largest = run.config.machine.shard or 1, run.config.batch.largest
    if count % shard:
        help = f"start a multiple of {shard} processes: `torchrun --nproc-per-node {shard} -m tfkit train ...`"
        raise run.error(
            f"the number of processes must be a multiple of `machine.shard`, {shard}; got {count}",
            "machine",
            "shard",
            help=help,
        )
    for sequences in (size for size in run.sizes.values if size % count):
        message = f"a batch of {sequences} sequences cannot be divided among {count} processes"
        raise run.error(message, "batch", "sequences", help=f"start a number of processes that divides {sequences}")
    size = run.config.machine.micro_batch
    if run.config.loss.undivided and (count > 1 or size == "auto" or run.config.micro_batch < largest):
        message = f"the loss `{run.config.loss.kind_name()}` must be computed from all sequences of a step together"
        raise run.error(message, "loss", help="train in one process, with `micro_batch` at its default")
    if count == 1 and run.config.machine.gather != "float32":
        message, help = "`gather` has no effect in a single process", "remove it, or start several processes"
        raise run.error(message, "machine", "gather", help=help)
    if count > 1 and size == "auto":
        message = "`micro_batch: auto` cannot be used with several processes"
        raise run.error(message, "machine", "micro_batch", help="set `micro_batch` to a number")


def launched_count() -> int:
    """Return the number of processes that a launcher such as `torchrun` started; 1 without a launcher.

    Raises SpecError if an environment variable that the processes need to connect is missing or invalid.
    """
    if "LOCAL_RANK" not in os.environ:
        return 1
    count = _integer_variable("WORLD_SIZE", 1, 2**31 - 1)
    if count > 1:
        _integer_variable("RANK", 0, count - 1)
        _integer_variable("LOCAL_RANK", 0, count - 1)
        _integer_variable("MASTER_PORT", 1, 2**16 - 1)
        if not os.environ.get("MASTER_ADDR"):
            raise _launcher_error("MASTER_ADDR must be the address of the first process; got nothing")
    return count


def _integer_variable(name: str, low: int, high: int) -> int:
    text = os.environ.get(name, "")
    if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
        value = quoted(text) if text else "nothing"
        raise _launcher_error(f"{name} must be an integer from {low:,} to {high:,}; got {value}")
    return int(text)


def _launcher_error(message: str) -> SpecError:
    help = "start the processes with `torchrun`, or unset LOCAL_RANK to train in a single process"
    return SpecError(Diagnostic(f"the environment variable {message}", help=help))

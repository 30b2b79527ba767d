"""Several processes that train one model, each with a shard of the weights and a part of the batch.

`torchrun` starts the processes, and torch's `fully_shard` shards the weights: the parameters of a layer are gathered
before it runs, and the sums of their gradients are scattered after it. Parameters outside of layers are in the root
group, because a tied head uses the embedding table, which must be gathered for both. https://arxiv.org/abs/2304.11277
"""

from __future__ import annotations

import operator
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import Any, TypeVar

import click
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from tfkit.building.builder import build, filled_by_layer
from tfkit.building.first_loss import warn_of_first_losses
from tfkit.building.placement import device_of
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.nn import full_tensor
from tfkit.run.checked_run import Run
from tfkit.run.contract import Ids
from tfkit.run.training.adapters import assign_tensors, checkpoint_tensors, insert_adapters, outline_of
from tfkit.run.training.checkpoint import Checkpoint, RunStore
from tfkit.run.training.layers import layers_of
from tfkit.run.training.processes import COPY, Processes
from tfkit.run.training.saving import Saving

T = TypeVar("T")
_BACKEND = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
PATIENCE = timedelta(minutes=10)
"""The longest wait for another process."""
GRACE = 30
"""Seconds after which a process ends that has lost a different process: as long as torchrun waits before a kill."""


class Together(Processes):
    """One of several processes that train together."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._saving: Saving | None = None

    def device(self, name: str) -> torch.device:
        kind = device_of(name).type
        if kind == "cpu":
            return torch.device("cpu")
        if name != "cuda":
            raise ValueError(
                f"the device of several processes must be `cpu`, or `cuda` with a GPU for each; got `{name}`"
            )
        device = device_of(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
        return device

    def build(self, run: Run, device: torch.device) -> fx.GraphModule:
        model, checksum = self._sharded(run, device)
        self.check_equal(checksum, "began with different weights")
        if self.rank == 0:
            warn_of_first_losses(model, run.graph)
        model.meta[COPY] = lambda: self._sharded(run, device, reshard=True)[0]
        return model

    def _sharded(self, run: Run, device: torch.device, *, reshard: bool = False) -> tuple[fx.GraphModule, str]:
        """Return the sharded model, and a checksum of its weights. `reshard` frees the root after a forward."""
        machine = run.config.machine
        shard = machine.shard or self.count
        mesh = init_device_mesh(device.type, (self.count // shard, shard), mesh_dim_names=("replicate", "shard"))
        backend, sums = machine.attention, []
        model = build(run.graph, device="meta", attention_backend=backend)
        insert_adapters(model, run)
        layers = [layer for _, layer in layers_of(model, once=True)]
        filled = filled_by_layer(model, layers, device=device, seed=run.config.seed, attention_backend=backend)
        for module in filled:
            sums.append(_weight_checksum(module))
            # As under autocast, the table and the norms are not cast: the residual stream stays float32.
            if machine.gather == "bfloat16" and module is not model:
                for norm in _norms_with_weights(model, module):
                    _shard_module(norm, mesh)
                _shard_module(
                    module, mesh, MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
                )
            else:
                _shard_module(module, mesh, reshard=reshard)
        return model, " ".join(sums)

    def reshard(self, model: fx.GraphModule) -> None:
        if isinstance(model, FSDPModule):
            model.reshard()

    def rows(self, indices: Ids) -> Ids:
        count = len(indices) // self.count
        return indices[self.rank * count : (self.rank + 1) * count]

    def sum(self, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    def agreed(self, reason: str | None) -> str | None:
        if not self.sum(torch.tensor(int(reason is not None), device="cpu")):
            return None
        return next(answer for answer in self._from_all(reason) if answer is not None)

    def check_equal(self, value: str, what: str) -> None:
        ranks = [str(rank) for rank, other in enumerate(self._from_all(value)) if other != value]
        if ranks:
            raise SpecError(Diagnostic(f"process {self.rank} differs from {', '.join(ranks)}: it {what}"))

    def total(self, sums: Sequence[Any]) -> list[Any]:
        return [reduce(operator.add, parts) for parts in zip(*self._from_all(sums), strict=True)]

    def save(self, checkpoint: Checkpoint, record: RunStore) -> None:
        if self._saving is None:
            self._saving = Saving.of(checkpoint.model, self._from_all, writes=self.rank == 0)
        self._saving.begin(checkpoint, record, self._gathered)

    def finish_saving(self) -> None:
        if self._saving is not None:
            self._saving.finish()

    def full_model(self, model: fx.GraphModule) -> fx.GraphModule | None:
        tensors = self._gathered(checkpoint_tensors(model))
        return None if self.rank else assign_tensors(outline_of(model), tensors)

    def _gathered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        copies = {}
        for name, tensor in tensors.items():
            gathered = full_tensor(tensor)  # all processes take part in it
            if self.rank == 0:
                copies[name] = gathered.to("cpu", copy=True)  # alone: the gathered tensor has padding
        return copies

    def _from_all(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values


def _norms_with_weights(model: fx.GraphModule, layer: nn.Module) -> list[nn.Module]:
    """Return the norms of a layer that have weights."""
    components = model.meta["components"].items()
    norms = {model.get_submodule(path) for path, config in components if config.slot == "norm"}
    return [module for module in layer.modules() if module in norms and any(True for _ in module.parameters())]


def _shard_module(
    module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None, *, reshard: bool = False
) -> None:
    policy = policy or MixedPrecisionPolicy()
    sharded: FSDPModule = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard or None)
    sharded.set_gradient_divide_factor(1.0)  # a sum: the loop divides by the positions of all processes
    sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other


def _weight_checksum(module: nn.Module) -> str:
    """Return a text that is equal for equal weights, on every machine: the sum of the bits of each full parameter."""
    parameters = [parameter.detach() for parameter in module.parameters() if not isinstance(parameter, DTensor)]
    return " ".join(str(parameter.view(torch.int32).sum().item()) for parameter in parameters)


# ---- the beginning and the end ----


@contextmanager
def distributed_processes() -> Iterator[Together]:
    """Connect the processes that `torchrun` started; the first process that fails reports the error for all.

    The remaining processes end without a message: they have the same error, or have lost the first process.
    """
    store, rank, count = _connect_processes()
    dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=count, timeout=PATIENCE)
    try:
        yield Together()
        dist.barrier()  # a process that ends earlier would take its connections with it
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent by the launcher when a process ends
        lost = isinstance(error, RuntimeError) and _is_lost(error)
        if lost:  # the thread of a checkpoint, for which Python waits at its end, may wait for hours
            signal.alarm(GRACE)
        if not _is_first(store):
            raise click.exceptions.Exit(1) from None
        if lost:
            message, cause = "another process of the run has ended, or does not answer", str(error).partition("\n")[0]
            help = "continue from the last checkpoint with the same command"
            raise SpecError(Diagnostic(message, notes=(cause,), help=help)) from error
        raise
    dist.destroy_process_group()


def _connect_processes() -> tuple[Any, int, int]:
    """Return the store of the launched processes, the rank of this process, and their number."""
    try:
        store, rank, count = next(rendezvous("env://", timeout=PATIENCE))
    except RuntimeError as error:  # torch has no narrower class for these errors
        address, cause = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", str(error).partition("\n")[0]
        message = f"the processes cannot connect at {quoted(address)}"
        help = "check MASTER_ADDR and MASTER_PORT: all processes must reach the first process there"
        raise SpecError(Diagnostic(message, notes=(cause,), help=help)) from error
    return store, rank, count


def _is_first(store: Any) -> bool:
    """Return True in the first process that calls this, and in all processes if the launcher has ended."""
    try:
        return store.add("failed", 1) == 1
    except dist.DistError:
        return True


def _is_lost(error: RuntimeError) -> bool:
    """Return True for connection errors, for which gloo has no separate class."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)

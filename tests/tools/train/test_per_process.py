"""The plan of several processes, against `fully_shard` in a group whose other processes do not exist."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

import tfkit
from tests.run.training.runs import PLUGINS, small_run
from tfkit.cli import main
from tfkit.nn.spread import rows_of
from tfkit.run.checked_run import Run, load_run
from tfkit.run.training.layers import layers_of, prepare_layers
from tfkit.run.training.parallel import _norms, _shard
from tfkit.tools.train.per_process import fitting, per_process
from tfkit.torch_private.dispatch import DispatchMode

BIG = """\
tfkit: 1
name: big
model: {{extends: {model}}}
data: {{kind: tokens, files: tokens.npy, split: {{train: 1.0}}}}
batch: {{sequences: {processes}, length: {length}}}
steps: 10
optimizer: {{kind: adamw, lr: 1e-4}}
"""


def big_run(folder: Path, model: str, processes: int, *sets: str, length: int = 512) -> Run:
    np.save(folder / "tokens.npy", np.arange((length + 88) * processes) % 1000)
    (folder / "big.yaml").write_text(BIG.format(model=model, processes=processes, length=length))
    return load_run(folder / "big.yaml", PLUGINS, sets=sets)


def measured(run: Run, processes: int) -> int:
    """The bytes of this process's weights."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        model = tfkit.build(run.graph, device="meta")
        mesh = init_device_mesh("cpu", (processes,))
        layers = [layer for _, layer in layers_of(model, once=True)]
        for module in (*layers, model):
            fully_shard(module, mesh=mesh)
        return sum(rows_of(parameter)[0].nbytes for parameter in model.parameters())
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "processes"), [("llama3_8b", 8), ("llama3_70b", 64), ("llama3_405b", 512)])
def test_parts_have_the_sizes_that_torch_gives_them(model: str, processes: int, tmp_path: Path) -> None:
    run = big_run(tmp_path, model, processes)
    needs, weights = per_process(run, processes, "adamw"), measured(run, processes)
    assert needs.weights == needs.gradients == pytest.approx(weights, rel=0.01)
    assert needs.states == pytest.approx(2 * weights, rel=0.01)


class Allocated(DispatchMode):
    """Counts the bytes of all tensors that exist: FSDP frees gathered weights by resizing their storage."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = weakref.ref(storage)
            weakref.finalize(storage, self.storages.pop, key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        alive = (reference() for reference in list(self.storages.values()))
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive if storage is not None))
        return out


def allocated(run: Run, processes: int) -> tuple[int, int]:
    """The most bytes in the forward and in the backward of the second of two micro-batches, without states."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    machine, length = run.config.machine, run.data.length
    try:
        mesh = init_device_mesh("cpu", (1, processes), mesh_dim_names=("replicate", "shard"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = tfkit.build(run.graph, device="meta")
            for module in model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[name] = nn.Parameter(torch.empty(parameter.shape))
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
            short = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            for _, layer in layers_of(model, once=True):
                if machine.gather == "bfloat16":
                    for norm in _norms(model, layer):
                        _shard(norm, mesh)
                _shard(layer, mesh, short if machine.gather == "bfloat16" else None)
            _shard(model, mesh)
            prepare_layers(model, machine)
            loss, tokens = tfkit.Loss(model, reduction="sum"), torch.zeros(1, length, dtype=torch.long)
            with Allocated(rows_of(parameter)[0] for parameter in model.parameters()) as memory:
                for _ in range(2):
                    memory.peak = 0
                    with torch.autocast("cpu", torch.bfloat16, enabled=run.config.precision == "bfloat16"):
                        out = loss({"tokens": tokens}, tokens)
                    forward, memory.peak = memory.peak, 0
                    out.backward()  # type: ignore[no-untyped-call]
                return forward, memory.peak
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "processes", "sets"),
    [
        ("llama3_8b", 8, "precision=bfloat16"),
        ("llama3_8b", 8, "precision=bfloat16 machine.recompute=selective"),
        ("llama3_8b", 8, "precision=bfloat16 machine.recompute=2"),
        ("llama3_8b", 8, "machine.recompute=full"),
        ("llama3_70b", 64, "precision=bfloat16 machine.recompute=full machine.gather=bfloat16"),
        ("llama3_70b", 64, "precision=bfloat16 machine.gather=bfloat16"),
        ("llama3_405b", 512, "precision=bfloat16 machine.recompute=full"),
        ("llama3_405b", 512, "precision=bfloat16 machine.recompute=full machine.gather=bfloat16"),
    ],
)
def test_a_plan_is_within_a_tenth_of_what_torch_allocates(
    model: str, processes: int, sets: str, tmp_path: Path
) -> None:
    run = big_run(tmp_path, model, processes, *sets.split(), length=8192)
    needs = per_process(run, processes, "adamw")
    # Each further pair of layers adds the same: two models of few layers give the sum for all.
    few, more = (
        allocated(big_run(tmp_path, model, processes, *sets.split(), count, length=8192), processes)
        for count in ("model.decoder.n_layers=4", "model.decoder.n_layers=6")
    )
    pairs = (next(node.stack.depth for node in run.graph.nodes if node.stack is not None) - 4) // 2
    peak = max(first + pairs * (second - first) for first, second in zip(few, more, strict=True))
    assert needs.total == pytest.approx(peak + needs.states, rel=0.1)


def test_machine_keys_lower_their_parts(tmp_path: Path) -> None:
    sets = ("batch.sequences=8", "precision=bfloat16", "model.decoder.n_layers=4")
    plain, gather, again, second, copies = (
        per_process(small_run(tmp_path, *sets, *more), 4, "adamw")
        for more in (
            [],
            ["machine.gather=bfloat16"],
            ["machine.recompute=full"],
            ["machine.recompute=2"],
            ["machine.shard=2"],
        )
    )
    assert gather.gathered < plain.gathered
    assert gather.sent < plain.sent
    assert gather.casts < plain.casts
    assert again.activations < second.activations < plain.activations
    assert copies.weights == pytest.approx(2 * plain.weights, abs=1)


def test_an_evaluation_needs_no_activations_of_other_layers(tmp_path: Path) -> None:
    sets = ("batch.sequences=8", "model.decoder.n_layers=4")
    assert per_process(small_run(tmp_path, *sets), 4, "adamw").evaluation == 0
    needs = per_process(small_run(tmp_path, *sets, "eval={every: 4, splits: {train: {batches: 2}}}"), 4, "adamw")
    shared = needs.weights + needs.gradients + needs.states + needs.gathered + needs.logits
    assert shared < needs.evaluation + needs.gathered // 2 + needs.logits // 2 < shared + needs.activations // 2


def test_the_cheapest_change_that_fits_is_named(tmp_path: Path) -> None:
    run = small_run(tmp_path, "batch.sequences=8", "precision=bfloat16", "model.decoder.n_layers=4")

    def total(**values: object) -> int:
        return per_process(run, 4, "adamw", run.config.machine.model_copy(update=values)).total

    limits = {
        "gather: bfloat16": total(gather="bfloat16"),
        "gather: bfloat16, micro_batch: 1": total(gather="bfloat16", micro_batch=1),
        "gather: bfloat16, recompute: full": total(gather="bfloat16", recompute="full"),
    }
    assert [*limits.values()] == sorted(limits.values(), reverse=True)
    assert total(recompute="full") > limits["gather: bfloat16, micro_batch: 1"]
    for text, limit in limits.items():
        assert fitting(run, 4, "adamw", limit) == f"machine: {{{text}}}"
    assert fitting(run, 4, "adamw", 10) is None


def test_a_plan_names_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path)
    limits = "{title: Small, flops: {float32: 1e12}, bandwidth: 1e9, memory: 1.6e5}"
    (tmp_path / "small_device.yaml").write_text(limits)
    words = ["train", str(tmp_path / "small.yaml"), "--no-plugins", "--plan", "--processes", "2"]
    sets = ["--set", "machine.shard=1", "--set", "batch.length=12"]
    assert main([*words, *sets, "--device", str(tmp_path / "small_device.yaml")]) == 0
    out = capsys.readouterr().out
    assert "each of 2 processes" in out
    assert out.splitlines()[-1].endswith("; the largest part is activations: machine: {micro_batch: 1}")
    assert main([*words, *sets, "--device", "h100"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "each process fits h100"
    assert main(["train", str(tmp_path / "small.yaml"), "--no-plugins", "--processes", "2"]) == 2
    capsys.readouterr()
    assert main([*words, "--device", "nope"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: invalid value for --device: there are no figures for `nope`; known: "
    )

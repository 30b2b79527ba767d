"""The plan of several processes, compared with `fully_shard` in a group of fake processes."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
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
from tfkit.run.training.parallel import _norms_with_weights, _shard_module
from tfkit.tools.common.units import bytes_text
from tfkit.tools.cost.cost import cost
from tfkit.tools.cost.devices import Device
from tfkit.tools.cost.step_memory import memory_of_step
from tfkit.tools.train.per_process import LeastTime, PerProcess, fitting_changes, fitting_count, least_time, per_process
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


def _leave_meta(model: nn.Module) -> None:
    """Replace the tensors of a model on the meta device by tensors of the current mode."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def allocated(run: Run, processes: int) -> tuple[int, int]:
    """The most bytes in the forward and in the backward of the second of two micro-batches, without states."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    machine, length = run.config.machine, run.data.length
    try:
        mesh = init_device_mesh("cpu", (1, processes), mesh_dim_names=("replicate", "shard"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = tfkit.build(run.graph, device="meta")
            _leave_meta(model)
            short = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            for _, layer in layers_of(model, once=True) if processes > 1 else ():
                if machine.gather == "bfloat16":
                    for norm in _norms_with_weights(model, layer):
                        _shard_module(norm, mesh)
                _shard_module(layer, mesh, short if machine.gather == "bfloat16" else None)
            if processes > 1:
                _shard_module(model, mesh)
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
        ("llama3_8b", 1, "precision=bfloat16 machine.recompute=full"),
        ("llama3_8b", 1, "precision=bfloat16"),
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


def test_a_single_process_gathers_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("model.decoder.n_layers=4", "eval={every: 4, splits: {train: {batches: 2}}}")
    run = small_run(tmp_path, *sets, "batch.sequences=1")
    copies, alone = (
        per_process(small_run(tmp_path, *sets, "batch.sequences=2"), 2, "adamw"),
        per_process(run, 1, "adamw"),
    )
    parameters = sum(weight.numel() for weight in tfkit.build(run.graph, device="meta").parameters())
    assert (alone.weights, alone.sent) == (4 * parameters, 0)
    assert alone.gathered < copies.gathered
    assert alone.evaluation - 4 * alone.weights < copies.evaluation - 4 * copies.weights
    assert fitting_changes(run, 1, "adamw", device(alone.peak - 1), 50e9) == "machine: {recompute: selective}"
    words = ["train", str(tmp_path / "small.yaml"), "--no-plugins", "--plan", "--processes", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("a single process")
    assert "sent in a step" not in out
    assert main([*words, "--set", "precision=bfloat16", "--set", "machine.gather=bfloat16"]) == 1
    assert "`gather` has no effect in a single process" in capsys.readouterr().err


def test_autocast_converts_each_matrix_once(tmp_path: Path) -> None:
    run = small_run(tmp_path, "precision=bfloat16")
    memory, model = memory_of_step(run.graph, 2, run.data.length, bfloat16=True), tfkit.build(run.graph, device="meta")
    for path, layer in memory.layers.items():
        weights = dict(model.get_submodule(path).named_parameters())
        assert layer.parameters == sum(weight.numel() for weight in weights.values())
        assert layer.casts == 2 * sum(weight.numel() for name, weight in weights.items() if "norm" not in name)
    assert memory.casts == 2 * model.get_parameter("head.output.weight").numel()  # outside of layers


def test_an_evaluation_needs_no_activations_of_other_layers(tmp_path: Path) -> None:
    sets = ("batch.sequences=8", "model.decoder.n_layers=4")
    assert per_process(small_run(tmp_path, *sets), 4, "adamw").evaluation == 0
    needs = per_process(small_run(tmp_path, *sets, "eval={every: 4, splits: {train: {batches: 2}}}"), 4, "adamw")
    shared = needs.weights + needs.gradients + needs.states + needs.gathered + needs.logits
    assert shared < needs.evaluation + needs.gathered // 2 + needs.logits // 2 < shared + needs.activations // 2


def device(memory: float, interconnect: float | None = None) -> Device:
    return Device("small", "Small", "", {"bfloat16": 1000}, int(memory), 1e12, "", interconnect)


def test_the_cheapest_change_that_fits_is_named(tmp_path: Path) -> None:
    run = small_run(tmp_path, "batch.sequences=8", "precision=bfloat16", "model.decoder.n_layers=4")

    def total(**values: object) -> int:
        return per_process(run, 4, "adamw", run.config.machine.model_copy(update=values)).total

    limits = {
        "gather: bfloat16": total(gather="bfloat16"),
        "gather: bfloat16, recompute: selective": total(gather="bfloat16", recompute="selective"),
        "gather: bfloat16, micro_batch: 1": total(gather="bfloat16", micro_batch=1),
        "gather: bfloat16, recompute: full": total(gather="bfloat16", recompute="full"),
    }
    for text, limit in limits.items():
        assert fitting_changes(run, 4, "adamw", device(limit), 50e9) == f"machine: {{{text}}}"
    assert fitting_changes(run, 4, "adamw", device(10), 50e9) is None
    # Where bytes bound a step, recomputation alone would be slower.
    limit = total(recompute="full")
    assert fitting_changes(run, 4, "adamw", device(limit, 1e3), 50e9) == "machine: {gather: bfloat16, recompute: full}"


def test_more_processes_are_named_where_they_suffice(tmp_path: Path) -> None:
    """Only weights, gradients and states are divided among more processes."""
    run = small_run(tmp_path, "batch.sequences=8", "precision=bfloat16")
    lean = {"recompute": "full", "micro_batch": 1, "shard": None, "gather": "bfloat16"}
    machine, text = run.config.machine.model_copy(update=lean), "recompute: full, micro_batch: 1, shard: null"

    def needs(count: int) -> PerProcess:
        return per_process(run, count, "adamw", machine)

    limit = needs(8).peak
    assert fitting_changes(run, 2, "adamw", device(limit), 50e9) is None
    changes = f"machine: {{{text}, gather: bfloat16}}"
    assert fitting_count(run, 2, "adamw", device(limit)) == f"use 8 processes, and {changes}"
    divided = needs(8).weights + needs(8).gradients + needs(8).states
    half = fitting_count(run, 2, "adamw", device(limit - divided // 2))
    assert half == f"use about 16 processes, {changes}, and at least as many sequences in a batch"
    largest = max(size for part, size in needs(8).parts.items() if part not in ("weights", "gradients", "states"))
    none = fitting_count(run, 2, "adamw", device(limit - divided - 1))
    assert none.startswith("no number of processes suffices, because ")
    assert f" need {bytes_text(largest)} in each; " in none


@pytest.mark.slow
def test_a_model_whose_layers_do_not_fit_needs_no_more_processes(tmp_path: Path) -> None:
    run = big_run(tmp_path, "llama3_405b", 16384, "precision=bfloat16")
    text = fitting_count(run, 16384, "adamw", device(50e9))
    assert re.fullmatch(
        r"no number of processes suffices, because gathered weights need \d+\.\d GB in each; "
        "use narrower layers or a smaller vocabulary",
        text,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "processes", "limit"),
    [("llama3_8b", 8, 80e9), ("llama3_70b", 64, 141e9), ("llama3_405b", 512, 192e9)],
)
def test_no_change_that_fits_is_faster(model: str, processes: int, limit: float, tmp_path: Path) -> None:
    sets = ("precision=bfloat16", f"batch.sequences={4 * processes}")
    run, limits, counted = big_run(tmp_path, model, processes, *sets, length=8192), device(limit, 450e9), {}
    times = {}
    for gather, micro, again in product(["float32", "bfloat16"], [None, 1], ["none", "selective", "full"]):
        values = {"gather": gather, "micro_batch": micro, "recompute": again}
        machine = run.config.machine.model_copy(update=values)
        needs = per_process(run, processes, "adamw", machine, counted)
        if needs.peak <= limit:
            time = least_time(needs, "bfloat16", limits, 50e9)
            assert time is not None
            times[tuple(values.values())] = time.seconds
    text = fitting_changes(run, processes, "adamw", limits, 50e9)
    assert text is not None
    changes = yaml.safe_load(text)["machine"]
    chosen = tuple({"gather": "float32", "micro_batch": None, "recompute": "none", **changes}.values())
    assert times[chosen] == min(times.values())


def test_the_least_time_is_the_longest_of_flops_links_and_network() -> None:
    limits = device(80e9, 450e9)

    def time(processes: int, shard: int, copied: float) -> LeastTime:
        needs = PerProcess(processes, shard, *[0] * 8, sent=900 * 10**9, copied=int(copied), flops=2 * 10**15)
        minimum = least_time(needs, "bfloat16", limits, 50e9)
        assert minimum is not None
        return minimum

    assert time(8, 8, 0) == LeastTime(compute=2.0, machine=2.0, network=0.0)
    # 900 GB enter a machine once, by eight adapters of 50 GB/s.
    assert time(64, 64, 0) == LeastTime(compute=2.0, machine=2.0, network=2.25)
    # 800 GB of weights, and 100 GB for each of eight devices.
    assert time(32, 16, 100e9) == LeastTime(compute=2.0, machine=800 / 450, network=4.0)
    # Weights stay in a machine; the four parts of 100 GB leave it by eight adapters.
    assert time(16, 4, 100e9) == LeastTime(compute=2.0, machine=2.0, network=1.0)
    assert (time(32, 16, 100e9).seconds, time(32, 16, 100e9).bound) == (4.0, "network")
    # At 40% of the peak, FLOPs take 5 s; a longer transfer would bound the step.
    assert (time(16, 4, 100e9).usual, time(32, 16, 400e9).usual) == (5.0, 9.25)
    with pytest.raises(ValueError, match="does not compute in float32"):
        least_time(PerProcess(8, 8, *[0] * 8, sent=0, copied=0, flops=0), "float32", limits, 50e9)


def test_a_smaller_last_micro_batch_counts_as_a_full_one(tmp_path: Path) -> None:
    run = small_run(tmp_path, "batch.sequences=8", "machine.micro_batch=3")
    costs = cost(run.graph, batch=3, length=run.data.length)
    assert per_process(run, 1, "adamw").flops == 3 * costs.total.visible


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_flops_of_a_step_include_what_runs_again(recompute: str, tmp_path: Path) -> None:
    run = small_run(tmp_path, "batch.sequences=8", f"machine={{micro_batch: 1, recompute: {recompute}}}")
    costs = cost(run.graph, batch=1, length=run.data.length, recompute=recompute == "full")
    assert per_process(run, 4, "adamw").flops == 2 * costs.total.visible


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
    *_, time, last = capsys.readouterr().out.splitlines()
    assert time.endswith((" s on h100, bound by compute", " s on h100, bound by machine"))
    assert last == "each process fits h100"
    assert main([*words, *sets, "--device", "h100", "--network", "400Gb/s"]) == 2
    assert "--network needs --device and more than 8 processes" in capsys.readouterr().err
    words[-1] = "16"
    assert main([*words, "--set", "batch.sequences=16", "--device", "h100", "--network", "80Mb/s", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["least_time"]["network"] == pytest.approx(data["sent"] / 8 / 10e6)
    assert data["least_time"]["bound"] == "network"
    assert main(["train", str(tmp_path / "small.yaml"), "--no-plugins", "--processes", "2"]) == 2
    capsys.readouterr()
    assert main([*words, "--device", "nope"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: invalid value for --device: there are no figures for `nope`; known: "
    )

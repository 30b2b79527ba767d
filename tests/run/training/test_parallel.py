"""Training by several processes: the numbers and the files of a single process.

All share two processes, which are forks of this one; `test_parallel_launches.py` has those that torch starts.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.distributed.fake_pg import FakeStore

import tfkit
from tfkit.building.model import is_sharded
from tfkit.cli import main
from tfkit.errors import SpecError
from tfkit.nn.spread import full_tensor, rows_of
from tfkit.run.training import loop, parallel
from tfkit.run.training.checkpoint import Checkpoint
from tfkit.run.training.loop import Trainer
from tfkit.run.training.parallel import Together, distributed_processes
from tfkit.run.training.parametrize import parameter_rules
from tfkit.run.training.processes import Processes, launched_count
from tfkit.run.training.saving import Saving
from tfkit.run.training.start import set_initial_weights

from ...sampling import some
from .launches import forked, numbers, options, tensors
from .runs import Memory, same, small_run, trained, write_run

TIED = ("model.head={block: lm_head, tie: embedding}", "batch.sequences=8", "clip=0.5")
WATCHED = (
    "eval={every: 4, splits: {val: {batches: 2}}}",
    "callbacks=[{kind: ema, decay: 0.7}, {kind: samples, every: 5, prompt: goats, tokens: 4}]",
)
SETS = [*TIED, *WATCHED, "data.split={train: 0.9, val: 0.1}", "checkpoint.every=3"]


def compare(actual: Path, expected: Path) -> None:
    """Every number, and the weights, but for rounding; biases of keys have a gradient of 0, which Adam inflates."""
    for first, other in zip(numbers(actual), numbers(expected), strict=True):
        assert first.keys() == other.keys()
        assert first == pytest.approx(other, abs=1e-5), first["step"]
    for name in ("model", "optimizer"):
        ours, theirs = tensors(actual, name), tensors(expected, name)
        assert ours.keys() == theirs.keys()
        for path, tensor in ours.items():
            if not path.startswith("decoder.layers") or "project" not in path:
                torch.testing.assert_close(tensor, theirs[path], atol=2e-4, rtol=0)


# ---- the variables of a launcher ----

LAUNCHED = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *product(["WORLD_SIZE", "RANK", "MASTER_PORT", "MASTER_ADDR"], [None, ""]),
        *product(["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"], ["two", "-1", "1.0", "9" * 5000]),
        *[("RANK", "2"), ("LOCAL_RANK", "2"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "65536")],
    ],
)
def test_the_variables_of_a_launcher_are_checked(
    name: str, value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, text in (LAUNCHED | {name: value}).items():
        monkeypatch.delenv(variable, raising=False)
        if text is not None:
            monkeypatch.setenv(variable, text)
    assert main(["train", str(write_run(tmp_path)), "--no-plugins", "-o", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: the environment variable {name} must be ")
    assert max(map(len, error.split("\n"))) < 160


@pytest.mark.parametrize("variables", [{}, {"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "2", "RANK": "1"}])
def test_a_single_process_needs_no_address(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in LAUNCHED:
        monkeypatch.delenv(variable, raising=False)
    for variable, text in variables.items():
        monkeypatch.setenv(variable, text)
    assert launched_count() == 1


# ---- two processes ----


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run by one process, `one`, and with its first five steps by two processes, `two`."""
    folder = tmp_path_factory.mktemp("together")
    path = str(write_run(folder))
    assert main(["train", path, "--no-plugins", "-o", str(folder / "one"), *options(*SETS)]) == 0
    forked(folder, 2, path, "-o", "two", "--stop-after", "5", *options(*SETS))
    return folder


def test_two_processes_train_and_write_what_one_does(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(path.name for path in (runs / "two").glob("step-*")) == ["step-3", "step-5"]
    two = numbers(runs / "two")
    assert [line["step"] for line in two if "loss" in line] == [1, 2, 3, 4, 5]  # each once
    assert main(["train", str(runs / "small.yaml"), "--no-plugins", "-o", str(runs / "two"), *options(*SETS)]) == 0
    assert "the last digits may differ from before: processes: 2 -> 1" in capsys.readouterr().err
    compare(runs / "two", runs / "one")


# ---- this process among others, which are not there ----


class Second(Processes):
    """The second of two processes, alone."""

    rank = 1


@pytest.fixture
def _alone() -> Iterator[None]:
    """A group of one process, in memory."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_the_table_of_a_tied_head_stays_whole_for_both(tmp_path: Path) -> None:
    trainer = Trainer(small_run(tmp_path, *TIED), Memory(), processes=Together())
    spread = [name for name, module in trainer.model.named_modules() if is_sharded(module)]
    assert spread == ["", "decoder.layers.0", "decoder.layers.1"]


@pytest.mark.usefixtures("_alone")
def test_the_first_weights_are_those_of_one_process(tmp_path: Path) -> None:
    run, processes = small_run(tmp_path, *TIED), Together()
    spread = processes.full_model(Trainer(run, Memory(), processes=processes).model)
    alone = Trainer(run, Memory()).model.state_dict()
    assert spread is not None
    assert [*spread.state_dict()] == [*alone]
    assert same(spread.state_dict(), alone)


@pytest.mark.usefixtures("_alone")
def test_weights_of_layers_are_gathered_in_the_type_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table and the norms are not, so that the residual stream stays float32, as in a single process."""
    monkeypatch.setattr(loop, "check_count", lambda *_: None)  # which rejects `gather` in a group of one
    run = small_run(tmp_path, *TIED, "steps=1", "precision=bfloat16", "machine.gather=bfloat16")
    trainer, types = Trainer(run, Memory(), processes=Together()), dict[str, Any]()
    for name in ("embedding.tokens", "decoder.layers.1.ffn_norm_in"):
        module = trainer.model.get_submodule(name)
        module.register_forward_hook(
            lambda module, _, output, name=name: types.update({name: (module.weight.dtype, output.dtype)})
        )
    linear = trainer.model.get_submodule("decoder.layers.1.ffn.up")
    linear.register_forward_hook(lambda module, *_: types.update(linear=module.weight.dtype))
    layer = trainer.model.get_submodule("decoder.layers.1")
    layer.register_forward_hook(lambda *values: types.update(layer=values[-1].dtype))
    trainer.train()
    assert types["embedding.tokens"] == (torch.float32, torch.float32)
    assert types["decoder.layers.1.ffn_norm_in"] == (torch.float32, torch.float32)
    assert types["linear"] == torch.bfloat16
    assert types["layer"] == torch.float32


@pytest.mark.usefixtures("_alone")
def test_states_that_torch_cannot_put_together_are_gathered(tmp_path: Path) -> None:
    """An optimizer may have a sharded tensor without an axis, or of integers."""
    processes, record = Together(), Memory()
    model = processes.build(small_run(tmp_path, *TIED), torch.device("cpu"))
    weight = model.state_dict()["decoder.layers.0.ffn.up.weight"]
    states = {"norm": weight.norm(), "counts": (100 * weight).round().to(torch.int64), "mean": weight / 3}
    processes.save(Checkpoint(1, model, states, ()), record)
    processes.finish_saving()
    assert record.saved is not None
    assert same({name: full_tensor(state) for name, state in states.items()}, record.saved.optimizer)


MODELS = {
    "layers that run twice": ["model.decoder.layers={groups: 1}"],
    "parameters of no axis": ["model.decoder.residual={learned: scalar}"],
    "decay and momentum": ["optimizer={kind: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0.1}"],
    "whole matrices": ["optimizer={kind: muon, lr: 0.02, weight_decay: 0.1, others: {kind: adamw, lr: 1e-3}}"],
    "bfloat16 in micro-batches": ["precision=bfloat16", "machine.micro_batch=3"],
    "parametrization": ["parametrization={kind: mup, base: {model.d_model: 8}}"],
    "all of a split": ["eval={every: 4, splits: {val: all}}"],
}


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("what", some(MODELS, 2))
def test_a_group_of_one_computes_what_one_does(what: str, tmp_path: Path) -> None:
    run = small_run(tmp_path, *TIED, *MODELS[what])
    assert trained(run, processes=Together())[0].lines == trained(run)[0].lines


@pytest.mark.parametrize("rank", [0, 2])
def test_each_process_fills_its_rows_as_one_process_does(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a group of three whose others answer nothing: widths that three does not divide, and weights from a folder."""
    monkeypatch.setattr(Together, "check_equal", lambda *_: None)
    tfkit.save(Processes().build(small_run(tmp_path), torch.device("cpu")), tmp_path / "weights")
    path, cut = tmp_path / "weights", "model.decoder.n_layers=1"
    names = "map: {'decoder.layers.{i}': 'decoder.layers.{i + 1}'}, unused: [decoder.layers.0.*]"
    rule = ["parametrization={kind: mup, base: {model.d_model: 8}}", "model.init=xavier"]
    rule.append("model.decoder.attention={kind: mqa, n_heads: 4, d_head: 4}")  # q, k and v have different factors
    sets = (["seed=9"], rule, [f"weights={path}"], [cut, f"weights={{path: {path}, {names}}}"])
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        for run in (small_run(tmp_path, *changes) for changes in sets):
            sharded, alone = (each.build(run, torch.device("cpu")) for each in (Together(), Processes()))
            rules = parameter_rules(run)
            set_initial_weights(sharded, run, rules)
            set_initial_weights(alone, run, rules)
            for name, full in alone.state_dict().items():
                rows, start = rows_of(sharded.state_dict()[name])
                assert start == min(-(-len(full) // 3) * rank, len(full))
                assert torch.equal(rows, full[start : start + -(-len(full) // 3)]), name
    finally:
        dist.destroy_process_group()


LOST = "another process of the run has ended, or does not answer"


@pytest.mark.parametrize(
    ("error", "message"), [(RuntimeError("gloo: closed by peer"), LOST), (ValueError("data"), "data")]
)
def test_a_process_that_lost_another_has_a_time_to_end(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may still wait for the lost process, as long as a checkpoint may take."""
    monkeypatch.setattr(parallel, "_connect_processes", lambda: (dist.HashStore(), 0, 1))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises((SpecError, ValueError), match=message), parallel.distributed_processes():
            raise error
        left = signal.alarm(0)
        assert 0 < left <= parallel.GRACE if message == LOST else left == 0
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGTERM, handler)
        dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_processes_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Together, "_from_all", lambda self, value: ["a", value, "c"])
    processes = Together()
    processes.rank = 1
    with pytest.raises(SpecError, match="process 1 differs from 0, 2: it began with different weights"):
        processes.check_equal("b", "began with different weights")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (dist.DistNetworkError("reset\nat line 3"), True),
        (RuntimeError("gloo: reset\nat line 3"), True),
        (RuntimeError("reset\nat line 3"), False),
    ],
)
def test_a_lost_connection_is_reported_with_its_cause(
    error: RuntimeError, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "_connect_processes", lambda: (dist.HashStore(), 0, 1))
    monkeypatch.setattr(parallel.signal, "signal", lambda *_: None)
    monkeypatch.setattr(parallel.signal, "alarm", lambda _: None)
    try:
        with pytest.raises(SpecError if lost else RuntimeError) as raised, distributed_processes():
            raise error
    finally:
        dist.destroy_process_group()
    if isinstance(raised.value, SpecError):
        (diagnostic,) = raised.value.diagnostics
        assert diagnostic.message == LOST
        assert diagnostic.notes == (str(error).partition("\n")[0],)


def test_dropout_differs_between_processes(tmp_path: Path) -> None:
    dropout = small_run(tmp_path, "model.dropout=0.3")
    assert trained(dropout)[0].losses != trained(dropout, processes=Second())[0].losses
    plain = small_run(tmp_path)
    assert trained(plain)[0].losses == trained(plain, processes=Second())[0].losses


def test_processes_that_do_not_fit_the_run(tmp_path: Path) -> None:
    processes = Processes()
    with pytest.raises(
        SpecError, match=r"the number of processes must be a multiple of `machine.shard`, 2; got 1(.|\n)*machine\.shard"
    ):
        Trainer(small_run(tmp_path, "machine.shard=2"), Memory())
    processes.count = 4
    with pytest.raises(SpecError, match=r"a batch of 6 sequences cannot be divided among 4 processes"):
        Trainer(small_run(tmp_path), Memory(), processes=processes)


def test_one_process_does_not_import_what_several_need() -> None:
    actual = {
        path.name: re.findall(
            r"^( *)(?:from|import) \S*(?:torch\.distributed|training\.parallel)\b", text, re.MULTILINE
        )
        for path in Path(tfkit.__file__).parent.rglob("*.py")
        if (text := path.read_text(encoding="utf-8")).count("torch.distributed") or "training.parallel" in text
    }
    assert actual.pop("parallel.py")
    assert actual.pop("saving.py")  # which it imports
    assert actual.pop("command.py") == [" " * 8]  # inside of a branch
    assert actual.pop("spread.py") == [" " * 4]  # for types
    assert not any(actual.values())


def test_a_checkpoint_that_could_not_be_written_is_an_error_at_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "new_group", lambda **options: None)
    saving, failed = Saving(lambda path: [path], None), Future[Any]()
    failure: Any = (OSError("No space left on device"), None)
    failed.set_exception(CheckpointException("", {1: failure}))
    saving._last = failed
    with pytest.raises(SpecError, match="process 1 cannot write its part of the checkpoint: No space left on device"):
        saving.begin(cast(Any, None), cast(Any, None), dict)
    saving.finish()  # reported once

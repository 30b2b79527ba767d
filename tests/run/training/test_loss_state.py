"""The state of a loss: parameters and buffers that are not the model's, in checkpoints, resumed runs and branches."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

import tfkit
from tfkit.errors import SpecError
from tfkit.run.checked_run import Run, load_run
from tfkit.run.training.processes import Processes
from tfkit.tools.check.check import outcomes_of
from tfkit.tools.train.check.record import resumed_run
from tfkit.tools.train.check.run_under_test import reduced_run
from tfkit.tools.train.train import train_run

from ...plugin.test_faults import plugins
from .launches import finish, forked, latest, numbers, options, start_forks, tensors
from .losses import AveragedTeacherConfig, CentredConfig, ReferenceConfig
from .runs import Memory, same, trained, write_run

PLUGINS = plugins(AveragedTeacherConfig, CentredConfig, ReferenceConfig)
STATES = {
    "averaged_teacher": {"teacher.average.decoder.layers.0.ffn.up.weight"},
    "centred": {"calls", "queue"},
    "{kind: reference, path: REFERENCE}": {"offset"},
}


def run_of(folder: Path, loss: str, *sets: str) -> Run:
    path = write_run(folder)
    if "REFERENCE" in loss and not (folder / "reference").exists():
        tfkit.save(tfkit.build(load_run(path, PLUGINS, sets=["seed=8"]).graph, seed=5), folder / "reference")
    loss = loss.replace("REFERENCE", str(folder / "reference"))
    return load_run(path, PLUGINS, sets=[f"loss={loss}", "steps=6", "checkpoint={every: 2, last: 9}", *sets])


@pytest.mark.parametrize("loss", STATES)
def test_a_resumed_run_has_the_state_of_its_loss(loss: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, loss, "checkpoint={}")
    (uninterrupted, weights), parts = trained(run), Memory()
    trained(run, parts, until=3)
    resumed, ours = trained(run, Memory(parts.saved))
    assert [*parts.losses, *resumed.losses] == uninterrupted.losses
    assert same(ours, weights)
    assert uninterrupted.saved is not None
    assert resumed.saved is not None
    saved = uninterrupted.saved.tensors
    assert same(resumed.saved.tensors, saved)
    assert {f"loss/{name}" for name in STATES[loss]} <= {*saved}
    assert not any("model." in name or "reference." in name for name in saved)


def test_a_run_whose_loss_has_no_state_writes_none(tmp_path: Path) -> None:
    memory, _ = trained(run_of(tmp_path, "cross_entropy", "steps=2"))
    assert memory.saved is not None
    assert memory.saved.tensors == {}


def test_a_branch_continues_the_state_of_its_loss(tmp_path: Path) -> None:
    for last in (3, None):
        train_run(run_of(tmp_path, "centred"), tmp_path / "parts", PLUGINS, command="test", until=last)
    train_run(run_of(tmp_path, "centred"), tmp_path / "whole", PLUGINS, command="test")
    check_equal(tmp_path / "parts", tmp_path / "whole")
    branch = f"branch={{run: {tmp_path / 'whole'}, step: 4}}"
    train_run(run_of(tmp_path, "centred", branch), tmp_path / "branch", PLUGINS, command="test")
    assert same(tensors(tmp_path / "branch", "state"), tensors(tmp_path / "whole", "state"))
    assert numbers(tmp_path / "branch")[1:] == numbers(tmp_path / "whole")[4:]
    train_run(run_of(tmp_path, "averaged_teacher", branch), tmp_path / "new", PLUGINS, command="test")
    assert any("teacher" in name for name in tensors(tmp_path / "new", "state"))


def test_a_state_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    run, memory = run_of(tmp_path, "averaged_teacher"), Memory()
    trained(run, memory, until=2)
    assert memory.saved is not None
    name = "loss/teacher.average.decoder.layers.1.ffn.up.weight"
    for state, message in (
        ({key: tensor for key, tensor in memory.saved.tensors.items() if key != name}, "the checkpoint has no"),
        ({**memory.saved.tensors, "loss/bias": memory.saved.tensors[name]}, "the loss has no `bias`"),
    ):
        with pytest.raises(SpecError, match=f"the loss cannot continue from the checkpoint: ValueError: {message}"):
            trained(run, Memory(replace(memory.saved, tensors=state)))


class Differing(Processes):
    """A process that records what it would compare with another process."""

    count = 2

    def __init__(self) -> None:
        self.compared: list[str] = []

    def check_equal(self, value: str, what: str) -> None:
        if "loss" in what:
            self.compared.append(value)


def test_processes_compare_their_states_of_a_loss(tmp_path: Path) -> None:
    for of_rows in (False, True):
        states = []
        for seed in (3, 4):
            processes = Differing()
            sets = "steps=1", "data.order=sampled", "optimizer.lr=1e-30"  # the state is computed from updated weights
            run = run_of(tmp_path, f"{{kind: centred, of_rows: {of_rows}}}", *sets)
            run = replace(run, file=replace(run.file, config=run.config.model_copy(update={"seed": 3})))
            if seed == 4:  # other rows, with the same weights
                processes.rows = lambda indices: indices[::-1] // 2  # type: ignore[method-assign]
            trained(run, Memory(), processes=processes)
            states.append(processes.compared)
        assert len(states[0]) == 1
        assert (states[0] == states[1]) is not of_rows


@pytest.mark.parametrize("hidden", [pytest.param(False, marks=pytest.mark.slow), True])
def test_check_names_a_tensor_of_the_loss_that_no_module_lists(hidden: bool, tmp_path: Path) -> None:
    run = run_of(tmp_path, f"{{kind: averaged_teacher, hidden: {hidden}}}")
    checked = reduced_run(run, PLUGINS)
    (outcome,) = outcomes_of(checked, [resumed_run])
    assert (outcome.status == "ok") is not hidden
    if hidden:
        assert "`teacher.average.embedding.tokens.weight` of the loss" in outcome.fault
        assert "neither a parameter nor a persistent buffer" in outcome.fault


# ---- launches ----

SETS = options("steps=20", "batch.sequences=8", "checkpoint={every: 3, last: 2}", "model.dropout=0.2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_of(tmp_path, "{kind: reference, path: REFERENCE}")
    (tmp_path / "plugins").mkdir()
    shutil.copyfile(Path(__file__).with_name("losses.py"), tmp_path / "plugins" / "losses.py")
    return tmp_path


def words(folder: Path, loss: str, name: str) -> list[str]:
    loss = loss.replace("REFERENCE", str(folder / "reference"))
    return ["--plugin-dir", "plugins", "small.yaml", "-o", name, *SETS, "--set", f"loss={loss}"]


def check_equal(actual: Path, expected: Path) -> None:
    assert numbers(actual) == numbers(expected)
    for name in ("model", "optimizer", "state"):
        assert same(tensors(actual, name), tensors(expected, name))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("loss", ["centred", "{kind: reference, path: REFERENCE}"])
def test_a_stopped_launch_continues_with_equal_bits(processes: int, loss: str, folder: Path) -> None:
    forked(folder, processes, *words(folder, loss, "whole"))
    for last in ("10", "20"):
        forked(folder, processes, *words(folder, loss, "parts"), "--stop-after", last)
    check_equal(folder / "parts", folder / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_launch_continues_with_equal_bits(processes: int, folder: Path) -> None:
    forked(folder, processes, *words(folder, "centred", "whole"))
    running = start_forks(folder, processes, *words(folder, "centred", "killed"))
    while latest(folder / "killed") < 3 and running.poll() is None:
        time.sleep(0.002)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    assert len(children) == processes
    subprocess.run(["kill", f"-{signal.SIGKILL.value}", *children], check=True)
    assert finish(running)[0] != 0
    assert latest(folder / "killed") < 20
    forked(folder, processes, *words(folder, "centred", "killed"))
    check_equal(folder / "killed", folder / "whole")


@pytest.mark.slow
def test_processes_whose_losses_differ_end_with_an_error(folder: Path) -> None:
    status, _, errors = finish(start_forks(folder, 2, *words(folder, "{kind: centred, of_rows: true}", "out")))
    assert status != 0
    assert errors.count("error: ") == 1
    assert "a different state of the loss" in errors

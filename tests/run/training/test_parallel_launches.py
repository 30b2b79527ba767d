"""Launches of several processes as users start them: one or more in each test, all slow.

Where torch's launcher ends no process, the processes are forks of one, which imports torch once.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .killed import check_damage, killed_at_random, stage
from .launches import (
    TFKIT,
    TIMEOUT,
    Launch,
    children,
    finish,
    forked,
    latest,
    launched,
    numbers,
    options,
    start,
    start_forks,
    tensors,
)
from .runs import RECURRENT, same, write_run
from .test_parallel_start import CASES, MOE

pytestmark = pytest.mark.slow
SYMBOLS = 97
SETS = (
    "data={kind: text, files: symbols.txt, split: {train: 0.9, val: 0.1}}",
    "model.head={block: lm_head, tie: embedding}",
    "model.dropout=0",
    "batch.sequences=8",
    "steps=20",
    "clip=0.5",
    "checkpoint={every: 1, last: 30}",
    "eval={every: 10, splits: {val: {batches: 2}}}",
)
ENDLESS = [*options(*SETS), "--set", "steps=100000", "--set", "checkpoint={every: 10, last: 2}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a tied model whose vocabulary of 97 no number of processes divides."""
    folder = tmp_path_factory.mktemp("launches")
    write_run(folder)
    draw = random.Random(0)
    text = "".join(chr(0x100 + draw.randrange(SYMBOLS)) for _ in range(4000))
    assert len(set(text)) == SYMBOLS
    (folder / "symbols.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    forked(folder, 1, "small.yaml", "-o", "alone", *options(*SETS))
    return folder / "alone"


def check(actual: Path, alone: Path, lines: int = 20 + 3, loss: float = 1e-5) -> None:
    """Every number to 1e-5, over all steps, and every loss to `loss`."""
    ours, theirs = numbers(actual), numbers(alone)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    assert len(ours) == lines
    for first, other in zip(ours, theirs, strict=True):
        assert first == pytest.approx(other, abs=1e-5)
        if "loss" in other:  # an evaluation has none
            assert first["loss"] == pytest.approx(other["loss"], abs=loss, rel=0)


@pytest.mark.parametrize(
    ("processes", "sets"),
    [
        (2, []),
        (2, ["machine.micro_batch=1", "machine.recompute=full"]),
        (4, ["machine.shard=2", "machine.recompute=selective"]),
        (4, ["machine.shard=1", "machine.attention=eager"]),
    ],
)
def test_losses_are_those_of_one_process(folder: Path, alone: Path, processes: int, sets: list[str]) -> None:
    name = "-".join([str(processes), *sets])
    forked(folder, processes, "small.yaml", "-o", name, *options(*SETS, *sets))
    check(folder / name, alone)


FIFTY = ("steps=50", "clip=0.5", "optimizer.lr=1e-3", "model.d_model=32", "batch.sequences=8", "checkpoint.last=30")
CHAIN = (1, 2, 4, 1, 4, 2, 1)
"""Each number of processes after each other number."""


@pytest.mark.parametrize("case", [case for case in CASES if case != "layers that run twice"])
def test_architectures_have_the_losses_of_one_process(folder: Path, case: str) -> None:
    """Sharded, in copies of shards, and continued by each number of processes after each other number."""

    def train(processes: int, name: str, *arguments: str) -> None:
        sets = options(*CASES[case], *FIFTY, *(["machine.shard=2"] if processes == 4 else []))
        plugins = ["--plugin-dir", str(MOE), "--plugin-dir", str(RECURRENT)]
        forked(folder, processes, *plugins, "small.yaml", "-o", name, *sets, *arguments)

    for processes in (1, 2, 4):
        train(processes, f"{case}-{processes}")
    for number, processes in enumerate(CHAIN, 1):
        train(processes, f"{case}-chain", "--stop-after", str(8 * number))
    for name in (f"{case}-2", f"{case}-4", f"{case}-chain"):
        check(folder / name, folder / f"{case}-1", lines=50, loss=1e-6)


def test_muon_has_whole_matrices(folder: Path) -> None:
    """With the same halves of a batch, and no clipping by a norm, whose sum has another order in two processes.

    Its iteration is in bfloat16, and makes of a last digit that differs a difference of 1e-3.
    """
    sets = options(
        *SETS, "clip=null", "optimizer={kind: muon, lr: 0.02, weight_decay: 0.1, others: {kind: adamw, lr: 1e-3}}"
    )
    forked(folder, 1, "small.yaml", "-o", "muon-1", "--set", "machine.micro_batch=4", *sets)
    for last in (9, 20):
        forked(folder, 2, "small.yaml", "-o", "muon-2", "--stop-after", str(last), *sets)
    check(folder / "muon-2", folder / "muon-1")
    for name in ("model", "optimizer"):
        assert same(tensors(folder / "muon-2", name), tensors(folder / "muon-1", name))


def test_a_folder_of_two_goes_on_with_four_and_with_one(folder: Path, alone: Path) -> None:
    for processes, last in ((2, 7), (4, 13), (1, 20)):
        forked(folder, processes, "small.yaml", "-o", "mixed", "--stop-after", str(last), *options(*SETS))
    check(folder / "mixed", alone)


def test_dropout_and_all_continue_with_the_same_bits_for_the_same_number(folder: Path) -> None:
    sets = options(*SETS, "model.dropout=0.2")
    forked(folder, 2, "small.yaml", "-o", "whole", *sets)
    for last in (9, 20):
        forked(folder, 2, "small.yaml", "-o", "parts", "--stop-after", str(last), *sets)
    assert numbers(folder / "whole") == numbers(folder / "parts")
    for name in ("model", "optimizer"):
        assert same(tensors(folder / "whole", name), tensors(folder / "parts", name))


def test_launches_end_well_every_time(folder: Path) -> None:
    words = ["small.yaml", "--json", *options(*SETS, "steps=2")]
    assert '"ended": "finished"' in launched(folder, 2, *words, "-o", "again")
    for number in range(9):
        status, out, errors = finish(start_forks(folder, 2, *words, "-o", f"again-{number}"))
        assert status == 0, errors
        assert '"ended": "finished"' in out


READING = """\
import os, sys
from pathlib import Path
from tfkit.cli import main
from tfkit.run.training.loop import Trainer

own = Trainer.batch

def batch(self, step):
    found = own(self, step)
    with Path(f"read-{os.environ['WORLD_SIZE']}-{step}-{os.environ['RANK']}").open("wb") as file:
        file.write(found.inputs["tokens"].tobytes())
    return found

Trainer.batch = batch
sys.exit(main(sys.argv[1:]))
"""


def test_all_processes_together_read_what_one_does(folder: Path) -> None:
    """Also after they were stopped, and with evaluations between."""
    for processes in (1, 2):
        for last in ("3", "6"):
            words = ["small.yaml", "-o", f"reading-{processes}", "--stop-after", last, *options(*SETS)]
            forked(folder, processes, *words, program=READING)
    for step in range(1, 7):
        parts = [(folder / f"read-2-{step}-{rank}").read_bytes() for rank in (0, 1)]
        assert b"".join(parts) == (folder / f"read-1-{step}-0").read_bytes()


def until(running: subprocess.Popen[str] | Launch, folder: Path, step: int) -> None:
    """Wait until a run has a checkpoint of that step, or a later one; one that does not get there is ended."""
    end = time.monotonic() + TIMEOUT
    while latest(folder) < step:
        if running.poll() is not None or time.monotonic() > end:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            pytest.fail(f"the run made no steps: {running.communicate()[1]}")
        time.sleep(0.2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_ends_the_others(folder: Path, rank: int) -> None:
    name = f"killed-{rank}"
    running = start(folder, 2, "small.yaml", "-o", name, *ENDLESS)
    until(running, folder / name, 20)
    os.kill(children(running)[rank], signal.SIGKILL)
    began = time.monotonic()
    status, _, errors = finish(running)
    assert time.monotonic() - began < 60
    assert status == 1
    assert errors.count("error: ") == 1
    assert "error: another process of the run has ended, or does not answer" in errors
    newest = latest(folder / name)
    goes_on = start_forks(folder, 2, "small.yaml", "-o", name, "--stop-after", str(newest + 2), *ENDLESS)
    status, _, errors = finish(goes_on)
    assert status == 0, errors
    assert f"continued after step {newest}" in errors


IMPATIENT = """\
import sys
from datetime import timedelta
from tfkit.cli import main
from tfkit.run.training import parallel

parallel.PATIENCE, parallel.GRACE = timedelta(seconds=6), 3
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_hangs_in_a_save_ends_the_others(folder: Path, rank: int) -> None:
    """Their threads wait for its part of the checkpoint, and longer than a step would."""
    (folder / "impatient.py").write_text(IMPATIENT)
    name = f"hangs-{rank}"
    words = ["small.yaml", "-o", name, *ENDLESS, "--set", "checkpoint={every: 2, last: 2}"]
    running = start(folder, 2, *words, script="impatient.py")  # torch's launcher ends a process that hangs
    until(running, folder / name, 10)
    while running.poll() is None and stage(folder / name) != "parts":
        time.sleep(0.0005)
    ranks = children(running)
    os.kill(ranks[rank], signal.SIGSTOP)
    status, _, errors = finish(running)
    assert status == 1
    assert errors.count("error: another process of the run has ended, or does not answer") == 1
    assert not any(Path(f"/proc/{number}").exists() for number in ranks)


def test_killed_at_random_they_end_with_the_same_bytes(tmp_path: Path) -> None:
    print(killed_at_random(tmp_path, 4, seed=int.from_bytes(os.urandom(4))))


def test_a_signal_lets_all_save_and_end_well(folder: Path) -> None:
    running = start(folder, 2, "small.yaml", "-o", "told", *ENDLESS)
    until(running, folder / "told", 20)
    os.kill(children(running)[1], signal.SIGTERM)  # to one of them, and not the writer
    status, out, errors = finish(running)
    assert status == 0, errors
    assert "interrupted" in out
    last = [line["step"] for line in numbers(folder / "told") if "loss" in line][-1]
    assert latest(folder / "told") == last


WRONG = {  # found by the spec, by the processes together
    "a key that does not exist": ("model.d_modell=3", "no node or key `d_modell`"),
    "a number of processes": (
        "machine.shard=3",
        "the number of processes must be a multiple of `machine.shard`, 3; got 2",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_error_is_said_once(folder: Path, what: str) -> None:
    change, words = WRONG[what]
    status, _, errors = finish(start_forks(folder, 2, "small.yaml", "-o", what, *options(*SETS, change)))
    assert status == 1
    assert errors.count("error: ") == 1
    assert words in errors


def test_an_error_of_a_step_is_said_once(folder: Path) -> None:
    """While torch's launcher, which sees one of the processes end, ends the other."""
    status, _, errors = finish(start(folder, 2, "small.yaml", "-o", "infinite", *options(*SETS, "optimizer.lr=1e18")))
    assert status == 1
    assert errors.count("error: ") == 1
    assert "is not finite" in errors


def test_an_error_of_the_writer_alone_ends_all(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "thesis.tex").write_text("")
    status, _, errors = finish(start(folder, 2, "small.yaml", "-o", "other", *options(*SETS)))
    assert status == 1
    assert errors.count("error: ") == 1
    assert "must hold only the files of a run" in errors


BEGIN = f"import os; os.chdir('machine-' + os.environ['RANK']); {TFKIT}"


def test_data_that_differ_between_processes(folder: Path) -> None:
    """Each process reads a file of its own, as machines without a common folder do."""
    for rank in (0, 1):
        machine = folder / f"machine-{rank}"
        machine.mkdir()
        write_run(machine)
        (machine / "symbols.txt").write_text((folder / "symbols.txt").read_text() + "ĀĀĀ" * rank)
    status, _, errors = finish(start_forks(folder, 2, "small.yaml", "-o", "out", *options(*SETS), program=BEGIN))
    assert status == 1
    assert errors.count("error: ") == 1
    assert "reads a different run: its file, its data or its versions differ" in errors


def test_a_damaged_tensor_is_named_by_the_process_that_checks_it(tmp_path: Path) -> None:
    assert len(check_damage(tmp_path, 2)) == 2

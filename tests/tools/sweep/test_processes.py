"""Every run is trained once, even if processes of the sweep are killed or other sweeps run at the same time."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.run.training.cpu import times_libraries
from tests.run.training.runs import same
from tfkit.tools.common.atomic_files import try_lock
from tfkit.tools.sweep import sweep as module
from tfkit.tools.sweep import work
from tfkit.tools.sweep.arms import SweepRun
from tfkit.tools.train.record import locked_folder

from ...sampling import chosen
from .in_process import InProcess
from .small import SWEEP, TUNE, sweep, write

pytestmark = pytest.mark.usefixtures("here")

COMMAND = [sys.executable, "-m", "tfkit", "sweep", "sweep.yaml", "-o", "out", "--no-plugins"]


def sessions() -> dict[str, int]:
    """The processes that worked on each run."""
    return {
        path.parent.name: len(json.loads(path.read_text())["sessions"]) for path in Path("out").glob("runs/*/*.json")
    }


def wait(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.02)


STAND_IN = """\
#!/bin/sh
test "$1 $2 $3" = "-m tfkit train" || exit 2
echo "$(basename "$4")" "$CUDA_VISIBLE_DEVICES" >> started
if grep -q 1e+18 "$4/run.yaml"; then
  echo "error: the loss is not finite" >&2
  exit 1
fi
cp -r "made/runs/$(basename "$4")/." "$4"
"""
"""Instead of Python: it trains nothing, and has the folders of the runs in `made`."""


@pytest.fixture
def stand_in(complete_sweep: tuple[Path, list[str]], here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in, the runs that it has the folders of, and a sweep of one seed of them."""
    Path("made").symlink_to(complete_sweep[0])
    write(SWEEP.replace("[0, 1, 2]", "[0]"))
    Path("stand_in").write_text(STAND_IN)
    Path("stand_in").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(Path("stand_in").resolve()))


@pytest.mark.usefixtures("stand_in")
def test_each_run_has_a_process_whose_error_stops_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    write(SWEEP.replace("  gelu:", "  wild: {optimizer.lr: 1e18}\n  gelu:").replace("[0, 1, 2]", "[0]"))
    capsys.readouterr()
    assert sweep("--jobs", "2") == 1
    out, err = capsys.readouterr()
    assert re.search(r"^relu +\d\.\d+ ", out, re.MULTILINE), err
    assert re.search(r"^gelu +\d\.\d+ ", out, re.MULTILINE), err
    assert "not finite" in err
    assert len(Path("started").read_text().splitlines()) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_an_error_is_said_before_the_next_run_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after hours, at the end of a sweep in which more runs may fail in the same way."""
    text, start = [], work._start_process

    def started(*arguments: Any) -> Any:
        text.append(capsys.readouterr().err)
        return start(*arguments)

    monkeypatch.setattr(work, "_start_process", started)
    write(SWEEP.replace("  gelu:", "  wild: {optimizer.lr: 1e18}\n  gelu:").replace("[0, 1, 2]", "[0]"))
    assert sweep("--json") == 1
    assert re.fullmatch(r"error: the run in out/runs/\w+ failed\nerror: the loss is not finite\n\n", text[2])
    out, err = capsys.readouterr()
    assert "error" not in err
    assert list(json.loads(out)["errors"].values()) == ["error: the loss is not finite"]


GPUS: list[tuple[str, str, int, list[str]]] = [
    ("cuda", "", 2, ["0", "1"]),
    ("cuda", "3,GPU-5,7", 3, ["3", "GPU-5"]),
    ("cuda", "", 1, ["0", "0"]),
    ("cuda", "", 0, []),
    ("cuda:1", "", 2, []),
    ("cpu", "3,5", 2, ["3,5", "3,5"]),
]
"""The device of a run, `CUDA_VISIBLE_DEVICES`, the number of GPUs, and what two processes at once see of them."""


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("device", "visible", "count", "expected"), chosen(GPUS, GPUS[1:2]))
def test_runs_at_once_have_a_gpu_each(
    device: str, visible: str, count: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert sweep("--jobs", "2", "--set", f"machine.device={device}") == 0
    words = [word for line in Path("started").read_text().splitlines() for word in line.split()[1:]]
    assert sorted(words) == expected


def test_a_run_that_another_sweep_makes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its lock is free, and it is complete, nothing is left to do."""
    here = InProcess()

    def beside_another(runs: Sequence[SweepRun], **options: Any) -> dict[str, str]:
        runs[0].folder.mkdir(parents=True)
        lock = os.open(runs[0].folder / work.LOCK, os.O_CREAT | os.O_RDWR)
        assert try_lock(lock)

        def on_progress(complete: int, steps: int) -> None:
            if work.missing_runs(runs):
                here(runs)
                os.close(lock)

        return work.train_missing_runs(runs[:1], **{**options, "on_progress": on_progress})

    monkeypatch.setattr(module, "train_missing_runs", beside_another)
    monkeypatch.setattr(work, "subprocess", None)  # no process is to be started
    write(SWEEP.replace("[0, 1, 2]", "[0]"))
    assert sweep() == 0
    assert len(here.made) == 2


@pytest.mark.slow
def test_killed_in_the_middle_two_sweeps_go_on_at_once_and_an_error_stops_no_other_run() -> None:
    """The process that trains outlives its sweep; the next ones wait for it, and none makes a run twice.

    A run that diverges is complete, and one that fails is not.
    """
    broken = '  broken: {callbacks: [{kind: samples, every: 5, prompt: "@", tokens: 5}]}\n'
    more = SWEEP.replace("  gelu:", f"  wild: {{optimizer.lr: 1e18}}\n{broken}  gelu:")
    write(more.replace("[0, 1, 2]", "[0]"))
    first = subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait(lambda: any(Path("out").glob("runs/*/run.json")))
    first.send_signal(signal.SIGKILL)
    first.wait()
    processes = [subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    texts = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    for out, err in texts:
        assert re.search(r"^gelu +\d\.\d+ +1 +[+-]", out, re.MULTILINE)
        assert re.search(r"^wild +- +1 .* diverged 1/1$", out, re.MULTILINE)
        assert re.search(r"^broken +- +0 ", out, re.MULTILINE)
        assert err.count("error: ") == 2
        assert "`prompt` cannot be encoded by the tokenizer" in err
    good = {path.parent.name for path in Path("out").glob("runs/*/run.json") if json.loads(path.read_text())["ended"]}
    assert len(good) == 3
    assert {name: count for name, count in sessions().items() if name in good} == dict.fromkeys(good, 1)


@pytest.mark.slow
def test_a_finished_sweep_takes_little_more_time_than_its_libraries(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "train_missing_runs", InProcess())
    assert sweep() == 0
    bytecode = tmp_path_factory.mktemp("bytecode")
    assert times_libraries(COMMAND, bytecode, "torch, scipy.special") <= 1.4


def kill_all(first: subprocess.Popen[bytes]) -> None:
    """Kill a sweep and its processes, as a machine does that loses its power."""
    children = [int(word) for word in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()]
    for number in (first.pid, *children):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    first.wait()


def interrupted(command: Sequence[str], before: dict[Path, int], pause: float) -> None:
    """A sweep that is killed a little after its next checkpoint."""
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait(lambda: complete_checkpoints().keys() > before.keys() or first.poll() is not None)
    time.sleep(pause)
    if first.poll() is None:
        kill_all(first)


def complete_checkpoints() -> dict[Path, int]:
    """The checkpoints that are complete, up to the one that `latest` names, and when each was written."""
    result = {}
    for latest in Path("out").glob("runs/*/latest"):
        last = int(latest.read_text(encoding="utf-8").removeprefix("step-"))
        states = [latest.parent / f"step-{step}" / "state.json" for step in range(5, last + 1, 5)]
        result |= {state: state.stat().st_mtime_ns for state in states}
    return result


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bytes() -> None:
    """No checkpoint is written a second time: what is lost are the steps since the last one."""
    long = ["--set", "steps=60", "--set", "checkpoint={every: 5, last: 100}", "--jobs", "2"]
    write(SWEEP.replace("[0, 1, 2]", "[0]"))
    subprocess.run(
        [*(word if word != "out" else "uninterrupted" for word in COMMAND), *long], check=True, capture_output=True
    )
    before = dict[Path, int]()
    draw = random.Random(0)
    for _ in range(3):
        interrupted([*COMMAND, *long], before, pause=draw.random() / 2)
        assert before.items() <= complete_checkpoints().items()
        before = complete_checkpoints()
    subprocess.run([*COMMAND, *long], check=True, capture_output=True)
    assert before.items() <= complete_checkpoints().items()
    files = [path.relative_to("uninterrupted") for path in Path("uninterrupted").glob("runs/*/**/*")]
    numbers = [path for path in files if path.name == "metrics.jsonl"]
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert (len(numbers), len(weights)) == (2, 2 * 2 * 12)
    for path in numbers:
        assert Path("uninterrupted", path).read_bytes() == Path("out", path).read_bytes(), path
    for path in weights:  # the order of what their headers say of them is free
        assert same(load_file(Path("uninterrupted", path)), load_file(Path("out", path))), path


@pytest.mark.slow
def test_a_sweep_asked_to_end_asks_its_processes() -> None:
    write(SWEEP.replace("[0, 1, 2]", "[0]"))
    long = [*COMMAND, "--set", "steps=100000", "--set", "eval.every=100000"]
    first = subprocess.Popen(long, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait(lambda: any(Path("out").glob("runs/*/run.json")))
    time.sleep(0.5)
    first.terminate()
    assert first.wait(timeout=60) == 128 + signal.SIGTERM
    (folder,) = Path("out").glob("runs/*")
    with locked_folder(folder):  # nobody trains in it
        assert json.loads((folder / "run.json").read_text())["ended"] is None


@pytest.mark.slow
def test_printed_commands_train_the_sweep(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write(SWEEP.replace("[0, 1, 2]", "[0]") + TUNE.replace("1e-2]", "1e-2, 1e-3]"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    counts = []
    while True:
        capfd.readouterr()
        assert sweep("--commands") == 0
        printed = capfd.readouterr()
        counts.append(len(printed.out.splitlines()))
        if not counts[-1]:
            break
        words = ["xargs", "-P", "2", "-I", "{}", "sh", "-c", "{}"]
        subprocess.run(words, input=printed.out, text=True, check=True, stdout=subprocess.DEVNULL)
    assert counts == [6, 2, 0]
    before = sessions()
    assert sweep() == 0
    assert sessions() == before

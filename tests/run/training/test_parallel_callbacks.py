"""Every kind of callback in one and in two processes, with and without evaluations, alone and next to all others.

Run as a program, this file trains all cases in two processes, which `test_...` starts once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.run.training.launches import TIMEOUT, fork
from tests.run.training.runs import PLUGINS, Memory, trained, write_run
from tfkit.errors import SpecError
from tfkit.run.checked_run import Run, load_run
from tfkit.run.training.parallel import distributed_processes
from tfkit.run.training.processes import Processes

pytestmark = pytest.mark.slow
CALLBACKS = {
    "samples": "{kind: samples, every: 2, prompt: goats, tokens: 3}",
    "spikes": "{kind: spikes, window: 2, deviations: 0.1, skip: true}",
    "stop_at": "{kind: stop_at, below: 0.5}",
    "patience": "{kind: patience, evaluations: 9}",
    "ema": "{kind: ema, decay: 0.7}",
    "components": "{kind: components, every: 2}",
    "profile": "{kind: profile, after: 2, steps: 1}",
}
EVALUATIONS = {"eval": "{every: 2, splits: {val: {batches: 2}}, tasks: [FOLDER/sheep.jsonl]}", "none": "null"}
ROWS = [{"prompt": f"{n} sheep", "choices": [" and", " went", f" {n}"][: 2 + n % 2], "answer": n % 2} for n in range(7)]
MACHINE_TEXTS = {"profile"}
"""Texts that no two processes share."""


def cases(folder: Path) -> dict[str, Run]:
    """A run of 5 steps for each kind alone, and for all kinds that two processes support, in both orders."""
    several = [kind for kind in CALLBACKS if kind != "components"]
    lists = [*([kind] for kind in CALLBACKS), several, several[::-1]]
    return {
        f"{'+'.join(kinds)} {name}": load_run(
            folder / "small.yaml",
            PLUGINS,
            sets=[
                *("steps=5", "checkpoint.every=2", f"eval={evaluation.replace('FOLDER', str(folder))}"),
                f"callbacks=[{', '.join(CALLBACKS[kind] for kind in kinds)}]",
            ],
        )
        for kinds in lists
        for name, evaluation in EVALUATIONS.items()
    }


def lines_of(run: Run, processes: Processes) -> list[dict[str, Any]]:
    """The record of a run; of one that cannot be trained, its error."""
    memory = Memory()
    try:
        trained(run, memory, processes=processes)
    except SpecError as error:
        return [{"error": error.diagnostics[0].message}]
    assert memory.saved is not None or processes.rank
    averages = {name: sorted(state) for name, state in memory.models.items()}
    lines = [{name: value for name, value in line.items() if name not in MACHINE_TEXTS} for line in memory.lines]
    return [*lines, averages] if processes.rank == 0 else []


def train_all(folder: Path) -> int:
    """Train all cases, and write their records."""
    with distributed_processes() as processes:
        records = {name: lines_of(run, processes) for name, run in cases(folder).items()}
        if processes.rank == 0:
            (folder / "records.json").write_text(json.dumps(records), encoding="utf-8")
    return 0


def test_the_cases_have_all_kinds() -> None:
    assert set(CALLBACKS) == set(PLUGINS.registry.kinds("callback"))


def test_two_processes_record_what_one_does(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "sheep.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    command = [sys.executable, __file__, "2", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=2 * TIMEOUT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads((tmp_path / "records.json").read_text(encoding="utf-8"))
    for name, run in cases(tmp_path).items():
        lines = lines_of(run, Processes())
        if name.startswith("components"):
            assert all("error" not in line for line in lines)
            assert "cannot be used with several processes" in records[name][0]["error"]
            continue
        assert len(lines) == len(records[name]) > 5, name
        for line, expected in zip(records[name], lines, strict=True):
            assert line.keys() == expected.keys(), name
            numbers = {key: value for key, value in expected.items() if isinstance(value, float | int)}
            assert {key: line[key] for key in numbers} == pytest.approx(numbers, abs=1e-5), name


if __name__ == "__main__":
    sys.exit(fork(int(sys.argv[1]), lambda: train_all(Path(sys.argv[2]))))

"""Kills a run with SIGKILL at random moments, and restarts it each time.

python -m tests.tools.train.killed 100
python -m tests.tools.train.killed 10 distillation
python -m tests.tools.train.killed 5 data2vec
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tfkit.cli import main
from tfkit.spec.folder import LATEST


def attempt(words: Sequence[str], seconds: float | None = None) -> bool:
    """Train in a process of its own, killed after some time; True if it came to its end before."""
    pid = os.fork()
    if pid == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os._exit(main(["train", *words]))
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return False
    assert os.WEXITSTATUS(status) == 0, f"the run could not be continued: tfkit train {' '.join(words)}"
    return True


def killed_at_random(run: Sequence[str], folder: Path, times: int, *, seed: int = 0) -> tuple[list[Path], int]:
    """Kill runs until there were so many deaths; returns the folders of complete ones, and the deaths during a save.

    The last run then goes to its end: on a busy machine it might be killed before each step.
    """
    random_ = random.Random(seed)
    begin = time.perf_counter()
    assert attempt([*run, "-o", str(folder / "whole")])
    duration = time.perf_counter() - begin
    complete, deaths, saving = [], 0, 0
    while deaths < times:
        target = folder / f"run-{len(complete)}"
        while not attempt([*run, "-o", str(target)], random_.uniform(0.1, 0.8) * duration if deaths < times else None):
            deaths += 1
            saving += any(target.glob(".*")) if target.exists() else 0
            check_latest(target)
        complete.append(target)
    return complete, saving


def check_latest(folder: Path) -> None:
    """The checkpoint to continue from is whole."""
    if (folder / LATEST).exists():
        step = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
        assert {"model.safetensors", "optimizer.safetensors", "state.json", "spec.yaml"} <= set(os.listdir(step))


CALLBACKS = """callbacks=[{kind: components, every: 2}, {kind: ema, decay: 0.8}, {kind: patience, evaluations: 9},
    {kind: spikes, window: 2, deviations: 0.01, skip: true}]"""


OBJECTIVES = {
    "llada": "small.yaml",
    "data2vec": "small.yaml",
    "grpo": "gpt.yaml",
    "dpo": "sums.yaml",
}
"""Losses of docs/custom_objectives.md, with their runs."""


def write_case(folder: Path, case: str) -> list[str]:
    """Write the files of a case, and return the arguments of its run. Only `text` has no callbacks."""
    import tfkit
    from tests.run.kinds.test_columns import CASES, QUESTIONS, columns_run, write_lines
    from tests.run.training.launches import options
    from tests.run.training.runs import small_run, write_objectives, write_run
    from tests.tools.train.test_folder import SETS

    if case in CASES:
        model, data, metrics, split = CASES[case]
        write_lines(folder / "rows.jsonl")
        write_lines(folder / "quiz.jsonl", QUESTIONS)
        columns_run(folder, model, data, "batch.length=20")
        evaluation = f"eval={{every: 3, splits: {{{split}: all}}, metrics: {metrics}}}"
        patience = CALLBACKS.replace("evaluations: 9", f"metric: {split}.{metrics.strip('[]').partition(',')[0]}")
        sets = ["batch.length=20", "batch.sequences=4", evaluation, patience]
        return [str(folder / "run.yaml"), *options(*sets, "checkpoint={every: 1, last: 2}")]
    if case in OBJECTIVES:
        write_objectives(folder)
        sets = [f"loss={case}", "batch.sequences=4", "steps=8", "checkpoint={every: 1, last: 2}", "schedule=constant"]
        evaluation = "eval={every: 3, splits: {val: {batches: 2}}, metrics: [objective]}"
        run = [str(folder / OBJECTIVES[case]), "--no-plugins", "--plugin-dir", str(folder / "plugins")]
        return [*run, *options(*sets, evaluation)]
    run = [str(write_run(folder)), *SETS, *options("checkpoint={every: 1, last: 2}")]
    if case == "distillation":
        tfkit.save(tfkit.build(small_run(folder).graph), folder / "teacher")
        return [*run, *options(f"loss={{kind: distillation, teacher: {folder / 'teacher'}}}", CALLBACKS)]
    return run


def run_script(times: int, case: str = "text") -> None:
    from tests.tools.train.test_folder import contents

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = write_case(folder, case)
        complete, saving = killed_at_random(run, folder, times, seed=int.from_bytes(os.urandom(4)))
        invalid = [path.name for path in complete if contents(str(path)) != contents(str(folder / "whole"))]
    print(f"{times} deaths, {saving} of them in a save; {len(complete)} complete runs; {len(invalid)} differ")
    sys.exit(1 if invalid else 0)


if __name__ == "__main__":
    run_script(int(sys.argv[1]), *sys.argv[2:])

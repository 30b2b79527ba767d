"""The CPU time of the callback `components` as a fraction of a run's steps, at `every: 50`, for two sizes of a step.

OMP_NUM_THREADS=1 python tools/bench/components.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tfkit
from tfkit.run.checked_run import load_run
from tfkit.run.training.loop import Trainer
from tfkit.tools.train.record import RunFolder, bits_of

MAX_FRACTION = 0.02
RUN = "minigpt_relu"
SIZES = {"16 x 128": (), "8 x 64": ("batch.sequences=8", "batch.length=64")}


def fraction(steps: int, *sets: str) -> tuple[float, float]:
    """Return the milliseconds of a step, and the time of the callback as a fraction of the remaining time."""
    sets = (*sets, "callbacks={kind: components, every: 50}", "eval=null", f"steps={steps}")
    run, times = load_run(RUN, tfkit.load_plugins(), sets=sets), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(run, RunFolder(Path(folder), run, bits_of(run, 1), {}))
        (callback,) = trainer._callbacks
        for name in ("reject", "on_step"):
            setattr(callback, name, timed(getattr(callback, name), name, times))
        begin = time.process_time()
        trainer.train()
        total = time.process_time() - begin
    spent = sum(times.values())
    return (total - spent) / steps * 1000, spent / (total - spent)


def timed(method: Any, name: str, times: dict[str, float]) -> Any:
    """Wrap a method so that it adds its duration to `times`."""

    def call(*args: Any) -> Any:
        begin = time.process_time()
        try:
            return method(*args)
        finally:
            times[name] = times.get(name, 0.0) + time.process_time() - begin

    return call


def main() -> int:
    """Print a row for each size. Return 1 if the callback takes too much time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, metavar="N")
    steps = parser.parse_args().steps
    print("| batch | ms a step | `components` |\n|---|---|---|")
    fractions = []
    for size, sets in SIZES.items():
        milliseconds, of_run = fraction(steps, *sets)
        fractions.append(of_run)
        print(f"| {size} | {milliseconds:.1f} | {of_run:.2%} |")
    return int(max(fractions) > MAX_FRACTION)


if __name__ == "__main__":
    sys.exit(main())

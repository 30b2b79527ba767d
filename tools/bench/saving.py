"""Measure how long a checkpoint interrupts training: asynchronous and synchronous checkpoints in turns, in one run.

Several processes train a GPT of 29 million parameters. The second column is the time from a checkpoint to the next: it
includes the slowdown of steps, which share the cores with the writing.

python tools/bench/saving.py --saves 12 --processes 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from runs import write_symbols

import tfkit
from tfkit.run.checked_run import load_run
from tfkit.run.training import parallel
from tfkit.run.training.checkpoint import Checkpoint, RunStore
from tfkit.run.training.loop import Trainer
from tfkit.run.training.parallel import Together
from tfkit.tools.train.record import Follower, RunFolder, bits_of

GOAL = 0.2
"""Largest fraction of the synchronous time for which an asynchronous checkpoint may interrupt training."""
EVERY = 3
"""Steps from one checkpoint to the next."""
RUN = """\
tfkit: 1
name: saving
model:
  extends: gpt2
  vocab_size: data.vocab_size
  d_model: 512
  max_len: 64
  dropout: 0
  graph: {decoder: {n_layers: 9, attention: {n_heads: 8}}}
data: {kind: text, files: symbols.txt}
batch: {sequences: 2, length: 32}
steps: %d
optimizer: {kind: adamw, lr: 1e-4}
checkpoint: {every: %d, last: 2}
"""


class Timed(Together):
    """Processes that wait for every second checkpoint, and record the times."""

    def __init__(self) -> None:
        super().__init__()
        self.begins: list[float] = []
        self.stands: list[float] = []

    def save(self, checkpoint: Checkpoint, record: RunStore) -> None:
        self.finish_saving()
        self.check_equal("", "waits")
        self.begins.append(time.perf_counter())
        super().save(checkpoint, record)
        if len(self.stands) % 2:
            self.finish_saving()
            self.check_equal("", "waits")
        self.stands.append(time.perf_counter() - self.begins[-1])


def main() -> int:
    """Start the processes. Return 1 if checkpoints interrupt training for longer than the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=12, metavar="N")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    arguments = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        return _train(Path.cwd())
    with tempfile.TemporaryDirectory() as folder:
        write_symbols(Path(folder, "symbols.txt"), 97, 4000)
        Path(folder, "saving.yaml").write_text(RUN % (arguments.saves * EVERY, EVERY), encoding="utf-8")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.processes)]
        command = [sys.executable, *launcher, str(Path(__file__).resolve())]
        return subprocess.run(command, cwd=folder, env={"OMP_NUM_THREADS": "1", **os.environ}, check=False).returncode


def _train(folder: Path) -> int:
    run = load_run(folder / "saving.yaml", tfkit.load_plugins(entry_points=False))
    parallel.Together = Timed  # type: ignore[misc]
    with parallel.distributed_processes() as processes:
        assert isinstance(processes, Timed)
        out = folder / "out"
        out.mkdir(exist_ok=True)
        record = Follower(out, run) if processes.rank else RunFolder(out, run, bits_of(run, processes.count), {})
        Trainer(run, record, processes=processes).train()
        if processes.rank:
            return 0
    intervals = [end - begin for begin, end in pairwise(processes.begins)]
    # The first checkpoint of each type is omitted: it creates the threads and the memory that later checkpoints reuse.
    stands, intervals = processes.stands[2:-1], intervals[2:]
    fraction = statistics.median(stands[::2]) / statistics.median(stands[1::2])
    print(f"{'':14}{'training stands':>24}{f'{EVERY} steps with it':>24}")
    for name, begin in (("asynchronous", 0), ("synchronous", 1)):
        print(f"{name:14}{_seconds(stands[begin::2]):>24}{_seconds(intervals[begin::2]):>24}")
    print(f"training stands for {fraction:.1%} of the synchronous time; goal {GOAL:.0%}")
    return int(fraction > GOAL)


def _seconds(times: list[float]) -> str:
    return f"{statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})"


if __name__ == "__main__":
    sys.exit(main())

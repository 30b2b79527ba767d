"""Compare the loop of `tfkit train` with a handwritten loop, in alternating steps: CPU time of a thread, peak memory.

python tools/bench/train_loop.py --rounds 60
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from measure import ratio, take_turns
from worker import Worker

NAMES = {"tfkit": "tfkit train", "loop": "loop by hand, tfkit's model", "hand": "loop and model by hand"}
MAX_TIME, MAX_MEMORY = 1.02, 1.02


def main() -> int:
    """Measure, and print a row for each contender. Return 1 if the loop misses a goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, metavar="N")
    rounds = parser.parse_args().rounds
    script = str(Path(__file__).with_name("train_loop_worker.py"))
    workers = {name: Worker([sys.executable, script, name]) for name in NAMES}
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}

    def step(name: str) -> float:
        answers[name].append(workers[name].ask("step"))
        return answers[name][-1]["seconds"]

    times = take_turns({name: lambda name=name: step(name) for name in NAMES}, rounds)
    for worker in workers.values():
        worker.close()
    peaks = {name: answers[name][-1]["peak"] for name in NAMES}
    print("| | ms a step: least, median | loss | peak, MB | tfkit: median, quartiles | by least | memory |")
    print("|---|---|---|---|---|---|---|")
    missed = False
    for name, title in NAMES.items():
        slowdown, share = ratio(times["tfkit"], times[name]), peaks["tfkit"] / peaks[name]
        missed |= slowdown.median > MAX_TIME or share > MAX_MEMORY
        low, high = slowdown.quartiles
        print(
            f"| {title} | {min(times[name]) * 1000:.1f}, {statistics.median(times[name]) * 1000:.1f} "
            f"| {answers[name][-1]['loss']:.2f} | {peaks[name]:.0f} | {slowdown.median:.3f}, {low:.3f} to {high:.3f} "
            f"| {slowdown.of_minima:.3f} | {share:.3f} |"
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

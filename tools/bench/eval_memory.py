"""Memory of evaluations compared with a training step of the same micro-batch.

    python tools/bench/eval_memory.py

A run of a model of 2 layers of width 256 with a vocabulary of 32,000 and batches of 8 sequences of 256 tokens. Every
measurement is a fresh process with one thread, in float32 on the CPU. `tensors` is the peak of the allocations that
torch's profiler counts. It includes weights, and in a run also gradients and optimizer states. `process` is the peak
memory of the process. `plan` is the memory that `tfkit train --plan` predicts. The exit status is 1 if an evaluation
takes more than the training step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from cost_memory import MARK, peak_of
from measure import run_once
from torch.profiler import ProfilerActivity, profile, record_function

import tfkit
from tfkit.run.checked_run import load_run
from tfkit.run.training import memory
from tfkit.run.training.evaluate import evaluate_splits
from tfkit.run.training.loop import Trainer
from tfkit.tools.train.plan import run_plan

VOCABULARY, SEQUENCES, MEGABYTE = 32_000, 8, 1e6
SIZES = (8, 2)
WORK = ("training step", "evaluation in the run", "tfkit eval", "tfkit eval, generated answers")
RUN: dict[str, Any] = {
    "tfkit": 1,
    "name": "memory",
    "model": {
        "vocab_size": "data.vocab_size",
        "d_model": 256,
        "norm": "rmsnorm",
        "graph": {
            "embedding": "embedding",
            "decoder": {
                "block": "decoder",
                "n_layers": 2,
                "attention": {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "position": "rope"},
                "ffn": {"kind": "swiglu", "d_ff": 704},
            },
            "head": "lm_head",
        },
    },
    "data": {"kind": "copy", "symbols": VOCABULARY - 1, "items": 128, "sequences": 100},
    "batch": {"sequences": SEQUENCES},
    "steps": 2,
    "optimizer": {"kind": "adamw", "lr": 1e-3},
    "eval": {"every": 1, "splits": {"val": {"batches": 1}}, "metrics": ["loss", "accuracy", "exact_match"]},
}


class NoRecord:
    """A record that discards everything."""

    def restored(self) -> None:
        return None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Discard the numbers."""

    text = save = log

    def close(self) -> None:
        """Do nothing, because no file is open."""


def measure(work: str, size: int) -> dict[str, float]:
    """Measure the megabytes of tensors and of the process at the peak of a step, or of an evaluation."""
    torch.set_num_threads(1)
    metrics = ["eval.metrics=[decoded_exact_match]"] if work.endswith("answers") else []
    run = load_run(RUN, tfkit.load_plugins(entry_points=False), sets=[f"machine.micro_batch={size}", *metrics])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action = prepared(work, run)
        with record_function(MARK):
            action()
    process = memory.peak_memory(torch.device("cpu"))
    sizes = {"tensors": peak_of(profiler)[0], "process": process, "plan": run_plan(run).memory}
    return {name: size / MEGABYTE for name, size in sizes.items()}


def prepared(work: str, run: Any) -> Callable[[], object]:
    """Run all preparations, and return the action to measure."""
    if work.startswith("tfkit eval"):
        model = tfkit.build(run.graph)
        return lambda: evaluate_splits(model, run, run.config.eval.splits, run.config.eval.metrics)
    trainer = Trainer(run, NoRecord())  # type: ignore[arg-type]
    trainer._update()
    return trainer._update if work == WORK[0] else trainer._evaluate


def main() -> int:
    """Print the table; return 1 if an evaluation takes more memory than the step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("WORK", "SIZE"), help="measure in this process and print JSON")
    arguments = parser.parse_args().one
    if arguments:
        print(json.dumps(measure(arguments[0], int(arguments[1]))))
        return 0
    print("| micro-batch | | tensors, MB | process, MB | plan, MB |")
    print("|---|---|---|---|---|")
    exceeded = False
    for size in SIZES:
        limit = None
        for work in WORK:
            figures = run_once([sys.executable, __file__, "--one", work, str(size)])
            limit = limit or figures["tensors"]
            exceeded |= figures["tensors"] > limit
            print(
                f"| {size} | {work} | "
                + " | ".join(f"{figures[key]:,.0f}" for key in ("tensors", "process", "plan"))
                + " |"
            )
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())

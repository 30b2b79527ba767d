"""Compare the memory of a training step that `tfkit cost` predicts with the memory that the step uses.

    python tools/bench/cost_memory.py

The memory is the running sum of all allocations and releases in the trace of the PyTorch profiler, which begins before
the model is built. The peak is taken within the second step: forward, loss in chunks, backward, and fused AdamW.
Everything is float32 on the CPU, without dropout unless the name states it. Models have real widths, and few layers.
The profiler may lose events on a busy machine: if the sum after the step differs from weights plus optimizer states,
the measurement is repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import tfkit
from tfkit.tools.common.model_inputs import random_inputs
from tfkit.tools.cost.cost import Cost, cost

MARK = "the step that counts"
ATTEMPTS = 3


class Case(NamedTuple):
    """A model, changes that reduce it, and the size of its inputs."""

    spec: str
    sets: tuple[str, ...]
    batch: int
    length: int
    recompute: bool = False

    def __str__(self) -> str:
        layers = [change.rpartition("=")[2] for change in self.sets if "n_layers" in change]
        note = f", {layers[0]} layer{'s' * (layers[0] != '1')}" if layers else ""
        dropout = "" if "dropout=0" in self.sets or not _drops(self) else ", dropout"
        return f"{self.spec}{note}{dropout}{', recompute' if self.recompute else ''}"


def _drops(case: Case) -> bool:
    return case.spec in ("gpt2", "bert_base", "t5_small", "vaswani_base")


DRY = "dropout=0"
CASES = (
    Case("gpt2", (DRY,), 2, 64),
    Case("gpt2", (DRY, "decoder.n_layers=4"), 4, 512),
    Case("gpt2", (DRY, "decoder.n_layers=4"), 4, 512, recompute=True),
    Case("gpt2", ("decoder.n_layers=4",), 4, 256),
    Case("llama32_1b", ("decoder.n_layers=4",), 2, 256),
    Case("bert_base", (DRY, "encoder.n_layers=6"), 4, 256),
    Case("albert_base", (DRY,), 2, 128),
    Case("t5_small", (DRY,), 4, 128),
    Case("vaswani_base", (DRY,), 8, 128),
    Case("vaswani_base", (), 4, 128),
    Case("olmoe_1b_7b", ("decoder.n_layers=1",), 2, 256),
)


def measured(case: Case) -> tuple[int, int]:
    """Measure the bytes of the weights, gradients and optimizer states, and of the peak of a step."""
    for _ in range(ATTEMPTS):
        fixed, left, profiler = _profiled(case)
        peak, level = peak_of(profiler)
        if abs(level - left) < 0.01 * left:
            return fixed, peak
    raise RuntimeError(f"{case}: the profiler saw {level:,} bytes at the end, but there were {left:,}")


def _profiled(case: Case) -> tuple[int, int, profile]:
    """Profile two steps: return bytes of weights, gradients and optimizer states, bytes that stay, and the profile."""
    graph = tfkit.load(case.spec, sets=case.sets)
    inputs = random_inputs(graph, batch=case.batch, length=case.length)
    targets = torch.zeros(case.batch, case.length, dtype=torch.long)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = tfkit.build(graph, recompute=case.recompute).train()
        optimizer, loss = tfkit.adamw(model, lr=1e-4), tfkit.Loss(model)
        for step in range(2):
            with record_function(MARK if step else "warm-up"):
                loss(inputs, targets).backward()
                optimizer.step()
                fixed = _bytes(model, optimizer)
                optimizer.zero_grad(set_to_none=True)
    return fixed, _bytes(model, optimizer), profiler


def _bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in (*tensors, *states))


def peak_of(profiler: profile) -> tuple[int, int]:
    """Return the largest running sum of allocations since the start of the marked step, and the final sum."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    level = peak = 0
    counts = False
    for event in events:
        counts = counts or event.name() == MARK
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level if counts else 0)
    return peak, level


def predicted(case: Case) -> Cost:
    """Return the prediction of `tfkit cost`."""
    graph = tfkit.load(case.spec, sets=case.sets)
    return cost(
        graph,
        batch=case.batch,
        length=case.length,
        dtype=torch.float32,
        memory_length=case.length if case.spec in ("t5_small", "vaswani_base") else None,
        recompute=case.recompute,
        kernels="cpu",
    )


def rows(cases: tuple[Case, ...] = CASES) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| model | batch x length | fixed, predicted | measured | error | peak, predicted | measured | error |"
    yield "|---|---|---|---|---|---|---|---|"
    for case in cases:
        prediction, (fixed, peak) = predicted(case), measured(case)
        memory = prediction.memory
        pairs = ((memory.weights + memory.gradients + memory.optimizer, fixed), (prediction.peak, peak))
        cells = [f"{a / 1e6:,.1f} MB | {b / 1e6:,.1f} MB | {round(100 * (a - b) / b, 1) + 0.0:+.1f}%" for a, b in pairs]
        yield f"| {case} | {case.batch} x {case.length} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, metavar="N", help="the first N cases")
    for row in rows(CASES[: parser.parse_args().only]):
        print(row, flush=True)


if __name__ == "__main__":
    main()

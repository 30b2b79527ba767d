"""Memory and time of a training step with a vocabulary of 128,256: the loss in chunks, or from all logits.

    python tools/bench/memory.py [--rounds 3] [--json]

A Llama with 4 layers of width 512 and the vocabulary of Llama 3; forward and backward over 4 x 512 tokens, next-token
loss, with and without recomputation of the layers. Every step runs in a fresh process; the contenders take turns.
`tensors` is the peak of the memory that the step had allocated, minus the weights; `process` is the peak memory of the
process. On the CPU: float32, one thread, CPU time; on a GPU: bfloat16, and the clock of the GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from measure import WIDTH, Contender, accelerator, compare, machine, race, ratio, seconds
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import tfkit

VOCABULARY, WIDE, BATCH, LENGTH = 128_256, 512, 4, 512
SETS = [
    f"d_model={WIDE}",
    f"vocab_size={VOCABULARY}",
    "decoder.n_layers=4",
    "decoder.attention.n_heads=8",
    "decoder.attention.n_kv_heads=2",
    "decoder.ffn.d_ff=1408",
]
CONTENDERS = ("in chunks", "all logits", "in chunks, recompute", "all logits, recompute")
MEGABYTE = 2**20


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender (default 3)")
    parser.add_argument("--step", choices=CONTENDERS, help="run one step in this process and print its figures")
    parser.add_argument("--json", action="store_true", help="print every run as JSON")
    options = parser.parse_args()
    if options.step is not None:
        print(json.dumps(step(options.step)))
        return
    missing = [] if accelerator() else ["memory and time on a GPU: there is none"]
    contenders = [Contender(name, [sys.executable, __file__, "--step", name]) for name in CONTENDERS]
    race(contenders, options.rounds)
    goals = targets(contenders)
    where = f"{machine()}, {accelerator() or 'no GPU'}, torch {torch.__version__}"
    if options.json:
        runs = {contender.name: contender.runs for contender in contenders}
        about = {"date": str(date.today()), "machine": where}
        print(json.dumps({**about, "runs": runs, "targets": goals, "not_measured": missing}, indent=2))
    else:
        print(where)
        show(contenders, goals, missing)
    sys.exit(not all(result <= limit for result, limit in goals.values()))


def step(name: str) -> dict[str, float]:
    """Run a training step of a contender: seconds, and megabytes of tensors in addition to the weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = tfkit.build("llama3_8b", sets=SETS, device=device, dtype=dtype, recompute=name.endswith("recompute"))
    chunked = tfkit.Loss(model) if name.startswith("in chunks") else None
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)).to(device)

    def run(tokens: Tensor = tokens) -> None:
        loss = next_token_loss(model, tokens) if chunked is None else chunked(tokens)
        loss.backward()

    run(tokens[:1, :8])
    model.zero_grad(set_to_none=True)
    took, peak = (on_gpu if device == "cuda" else on_cpu)(run)
    return {"seconds": took, "tensors": peak / MEGABYTE}


def next_token_loss(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss in its usual form."""
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def on_gpu(run: Callable[[], None]) -> tuple[float, float]:
    """Measure seconds, and the peak bytes in addition to earlier allocations."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    took = seconds(run, "cuda")
    return took, torch.cuda.max_memory_allocated() - before


def on_cpu(run: Callable[[], None]) -> tuple[float, float]:
    """Measure seconds and bytes on the CPU, where torch counts memory only in a profile."""
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        took = seconds(run)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return took, max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")


def targets(contenders: list[Contender]) -> dict[str, tuple[float, float]]:
    """Return figure and limit by name: memory and time of the loss in chunks, relative to the loss from all logits."""
    stepwise, logits = contenders[:2]
    memory = ratio(stepwise.values("tensors"), logits.values("tensors")).of_minima
    time = ratio(stepwise.values("seconds"), logits.values("seconds")).of_minima
    return {"memory of the step": (memory, 1 / 3), "time of the step": (time, 1.1)}


def show(contenders: list[Contender], goals: dict[str, tuple[float, float]], missing: list[str]) -> None:
    """Print the tables, each line within 80 columns."""
    titles = {"tensors": "tensors of a step, MB", "rss": "process, MB", "seconds": "seconds of a step"}
    for key, title in titles.items():
        print(f"\n{title}\n{compare(contenders, key)}")
    print("\ntargets, in chunks / all logits")
    for what, (result, limit) in goals.items():
        print(f"  {'met' if result <= limit else 'MISSED':7}{what}: {result:.2f}, at most {limit:.2f}")
    print(*(f"  not measured: {line}"[:WIDTH] for line in missing), sep="\n")


if __name__ == "__main__":
    main()

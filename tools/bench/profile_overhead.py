"""The cost of the profiler: steps without and with the profiler, as in `tfkit profile`, in turns.

OMP_NUM_THREADS=1 python tools/bench/profile_overhead.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import torch
from measure import accelerator, machine, ratio, seconds, take_turns
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

import tfkit
from tfkit.tools.profile.measurement import DETAILS
from tfkit.tools.profile.profiled_step import ProfiledStep, Range, annotated_range, named_ranges, quick_range

GOAL = 1.4
MODEL = "gpt2"
SMALL_SIZES = (
    "decoder.n_layers=6",
    "d_model=384",
    "decoder.attention.n_heads=6",
    "decoder.ffn.d_ff=1536",
    "vocab_size=8192",
)


def main() -> None:
    """Print the ratio for each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="GPT-2 of 124M parameters instead of 14M")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    graph = tfkit.load(MODEL, sets=() if options.full else SMALL_SIZES)
    seconds_by_mode = {mode: race(graph, mode, options) for mode in ("train", "prefill", "decode")}
    if options.json:
        print(json.dumps({"machine": machine(), "gpu": accelerator(), "seconds": seconds_by_mode}))
        return
    size = "" if options.full else ", small"
    print(f"{MODEL}{size}: {options.batch} x {options.length} on {accelerator() or machine()}")
    print(f"  {'':9}{'plain ms':>10}   timed / plain: minima, median (spread)   with stacks, shapes and memory")
    for mode, times in seconds_by_mode.items():
        ratios = [ratio(times[name], times["plain"]) for name in ("timed", "detailed")]
        texts = [f"{share.of_minima:.3f}, {share.median:.3f} ({share.low:.2f} to {share.high:.2f})" for share in ratios]
        print(f"  {mode:9}{1000 * min(times['plain']):>10.2f}   {texts[0]:40}  {texts[1]}")
    print(f"  the goal is at most {GOAL} for timed steps")


def race(graph: tfkit.Graph, mode: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure the seconds of single steps, in turns."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tfkit.build(graph, device=device).train(mode == "train")
    step = ProfiledStep(model, mode, batch=options.batch, length=options.length, compile=False)  # type: ignore[arg-type]
    plain: Range = lambda name: nullcontext()  # noqa: E731
    contenders: dict[str, Callable[[], float]] = {
        "plain": lambda: seconds(lambda: step(plain), device),
        "timed": lambda: profiled(model, step, quick_range),
        "detailed": lambda: profiled(model, step, annotated_range, **DETAILS),
    }
    return take_turns(contenders, options.rounds, warm_up=1)


def profiled(model: torch.fx.GraphModule, step: ProfiledStep, range: Range, **options: bool) -> float:
    """Measure the seconds of the second of two steps under the profiler; the first step warms the profiler up."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with ExitStack() as stack:
        stack.enter_context(named_ranges(model, range))
        stack.enter_context(torch_profile(activities=activities, **options))  # type: ignore[arg-type]
        step(range)
        return seconds(lambda: step(range), next(model.parameters()).device.type)


if __name__ == "__main__":
    main()

"""Forward and backward of a small GPT-2: tfkit against the same model written by hand.

    python tools/bench/train_step.py [--rounds 20] [--operators] [--json]

One process, one thread, fp32, eager. The two take turns, round by round, in changing order; the figure is CPU time of
the process. Both models have the same weights, and must give the same logits before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from handwritten import GPT2
from measure import machine, ratio
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import tfkit

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 6, 384, 6, 8192, 256, 4


def models() -> dict[str, nn.Module]:
    """The two models with the same weights."""
    built = tfkit.build("gpt2", sets=_sets())
    by_hand = GPT2(n_layers=LAYERS, d_model=WIDTH, n_heads=HEADS, d_ff=4 * WIDTH, vocab_size=VOCABULARY, max_len=LENGTH)
    by_hand.copy_from(built)
    return {"tfkit": built, "by hand": by_hand}


def _sets() -> list[str]:
    return [
        "dropout=0",
        f"d_model={WIDTH}",
        f"vocab_size={VOCABULARY}",
        f"max_len={LENGTH}",
        f"decoder.n_layers={LAYERS}",
        f"decoder.attention.n_heads={HEADS}",
        f"decoder.ffn.d_ff={4 * WIDTH}",
    ]


def forward(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of predicting each next token."""
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def step(model: nn.Module, tokens: Tensor) -> None:
    """Forward and backward; the gradients are dropped."""
    forward(model, tokens).backward()
    model.zero_grad(set_to_none=True)


def infer(model: nn.Module, tokens: Tensor) -> None:
    """Forward alone."""
    with torch.inference_mode():
        model(tokens)


def race(
    run: Callable[[nn.Module, Tensor], None], both: dict[str, nn.Module], tokens: Tensor, rounds: int
) -> dict[str, list[float]]:
    """CPU seconds of each model's run in each round."""
    found: dict[str, list[float]] = {name: [] for name in both}
    for number in range(-2, rounds):
        for name in sorted(both, reverse=number % 2 == 0):
            start = time.process_time()
            run(both[name], tokens)
            if number >= 0:
                found[name].append(time.process_time() - start)
    return found


def operators(model: nn.Module, tokens: Tensor, times: int = 5) -> dict[str, tuple[float, float]]:
    """Calls and CPU milliseconds of each operator in one step."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(times):
            step(model, tokens)
    return {one.key: (one.count / times, one.self_cpu_time_total / times / 1000) for one in found.key_averages()}


def show_operators(both: dict[str, nn.Module], tokens: Tensor) -> None:
    """Operators that the two call differently often, and the most expensive ones."""
    ours, theirs = (operators(model, tokens) for model in both.values())
    print("\noperators of a training step           calls  by hand       ms  by hand")
    rows = []
    for name in {*ours, *theirs}:
        (calls, spent), (calls_by_hand, spent_by_hand) = ours.get(name, (0, 0)), theirs.get(name, (0, 0))
        if calls != calls_by_hand or max(spent, spent_by_hand) > 2:
            rows.append((max(spent, spent_by_hand), name, calls, calls_by_hand, spent, spent_by_hand))
    for _, name, calls, calls_by_hand, spent, spent_by_hand in sorted(rows, reverse=True)[:24]:
        print(f"  {name[:36]:36}{calls:>8.0f}{calls_by_hand:>9.0f}{spent:>9.2f}{spent_by_hand:>9.2f}")


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="how often each model runs (default 20)")
    parser.add_argument("--operators", action="store_true", help="compare the two operator by operator")
    parser.add_argument("--json", action="store_true", help="print every round as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens, both = torch.randint(VOCABULARY, (BATCH, LENGTH)), models()
    infer(both["tfkit"], tokens)
    torch.testing.assert_close(both["tfkit"](tokens), both["by hand"](tokens), rtol=0, atol=1e-5)
    rounds = {"forward and backward": race(step, both, tokens, options.rounds)}
    rounds["forward"] = race(infer, both, tokens, options.rounds)
    if options.json:
        print(json.dumps({"machine": machine(), "torch": torch.__version__, "cpu_seconds": rounds}, indent=2))
        return
    print(f"{machine()}, torch {torch.__version__}")
    print(f"GPT-2, {LAYERS} layers of width {WIDTH}, {BATCH} x {LENGTH} tokens, {options.rounds} rounds, CPU ms")
    print(f"  {'':22}{'tfkit':>9}{'by hand':>9}   tfkit / by hand")
    for name, found in rounds.items():
        ours, theirs = found["tfkit"], found["by hand"]
        held, spread = ratio(ours, theirs), f"({ratio(ours, theirs).low:.2f} to {ratio(ours, theirs).high:.2f})"
        middle = statistics.median(ours), statistics.median(theirs)
        print(f"  {name:22}{min(ours) * 1000:>9.1f}{min(theirs) * 1000:>9.1f}   {held.of_minima:.3f}")
        print(
            f"    {'median, by round':20}{middle[0] * 1000:>9.1f}{middle[1] * 1000:>9.1f}   {held.median:.3f} {spread}"
        )
    if options.operators:
        show_operators(both, tokens)


if __name__ == "__main__":
    main()

"""Measure where the best learning rate is at several widths, with and without a parametrization.

A small model of characters is trained at each width with each rate, without a rule and under muP with the narrowest
width as its base. The script prints the loss of each run, with a star at the best rate of a width, and the number of
steps of 2 between the best rates of all widths.

    python tools/transfer.py -o transfer

The same command continues: complete runs are read from their folders.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import tfkit
from tfkit.run.training.loop import DivergedError

KINDS, WIDTHS, STEPS, LAYERS, D_HEAD = ("standard", "mup"), (32, 64, 128, 256), 100, 2, 16
EXPONENTS = (-10, -9, -8, -7, -6, -5, -4)
"""Powers of 2 of the rates."""
LARGEST_SHIFT = 1
"""Largest shift of the best rate under muP, in steps of 2."""


def run_of(kind: str, width: int, exponent: int, seed: int, *, base: int, steps: int) -> dict[str, Any]:
    """Return a run of the model at a width and a rate; the width of heads is the same at all widths."""
    decoder = {
        "block": "decoder",
        "n_layers": LAYERS,
        "attention": {"kind": "mha", "n_heads": f"d_model // {D_HEAD}", "position": "rope"},
        "ffn": {"kind": "gelu", "d_ff": "4 * d_model"},
    }
    graph = {"embedding": "embedding", "decoder": decoder, "head": "lm_head"}
    sizes = {"vocab_size": "data.vocab_size", "d_model": width, "norm": "rmsnorm", "bias": False}
    run: dict[str, Any] = {
        "tfkit": 1,
        "name": "transfer",
        "seed": seed,
        "steps": steps,
        "model": {**sizes, "graph": graph},
    }
    run |= {"data": {"kind": "text", "files": "tinyshakespeare", "tokenizer": "characters"}}
    run |= {"batch": {"sequences": 8, "length": 32}, "schedule": {"kind": "cosine", "warmup": 10}}
    run |= {"optimizer": {"kind": "adamw", "lr": 2.0**exponent}}
    run |= {"eval": {"every": steps, "splits": {"val": {"batches": 16}}}}
    if kind != "standard":
        run["parametrization"] = {"kind": kind, "base": {"model.d_model": base}}
    return run


def final_loss(run: dict[str, Any], folder: Path) -> float:
    """Train a run unless its folder is complete, and return its last loss; infinite if the run diverged."""
    try:
        trained = tfkit.train(run, output=folder, quiet=True)
    except DivergedError:
        return math.inf
    return trained.history.curves["val.loss"][-1][1]


def best_exponents(losses: dict[tuple[int, int], float], widths: Sequence[int]) -> list[int]:
    """Return the exponent of the best rate of each width."""
    return [min(EXPONENTS, key=lambda exponent: losses[width, exponent]) for width in widths]


def table_of(losses: dict[tuple[int, int], float], widths: Sequence[int]) -> list[str]:
    """Return a line for each width, with its losses by rate."""
    lines = ["width  " + "".join(f"{f'2^{exponent}':>9}" for exponent in EXPONENTS)]
    for width, best in zip(widths, best_exponents(losses, widths), strict=True):
        cells = [f"{losses[width, at]:.4f}{'*' if at == best else ' '}" for at in EXPONENTS]
        lines.append(f"{width:5}  " + "".join(f"{cell:>9}" for cell in cells))
    return lines


def main() -> int:
    """Print the losses under each rule; return 1 if the best rate moves too far under muP, or is at an edge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("transfer"), help="the folder of the runs")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    options, failed = parser.parse_args(), False
    torch.set_num_threads(1)
    for kind in KINDS:
        losses = {}
        for width in options.widths:
            for exponent in EXPONENTS:
                of_seeds = []
                for seed in range(options.seeds):
                    run = run_of(kind, width, exponent, seed, base=options.widths[0], steps=options.steps)
                    folder = options.output / f"{kind}-{width}-{exponent}-{seed}-{options.steps}"
                    of_seeds.append(final_loss(run, folder))
                losses[width, exponent] = fmean(of_seeds)
        best = best_exponents(losses, options.widths)
        shift = max(best) - min(best)
        print(kind, *table_of(losses, options.widths), f"the best rate moves by {shift} steps of 2\n", sep="\n")
        failed |= kind == "mup" and (shift > LARGEST_SHIFT or not EXPONENTS[0] < min(best) <= max(best) < EXPONENTS[-1])
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

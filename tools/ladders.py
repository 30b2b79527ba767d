"""Measure how often the intervals of scaling laws contain the truth, on ladders of known laws.

Each ladder has losses of L = E + A / N^a at a few sizes and seeds, with noise of each run, noise that a seed has at all
sizes, and deviations of sizes from the law that all seeds share. The script prints the fraction of ladders in which the
intervals of E, A, a, and of the mean loss at the next size contain their true values, which should be 95%.

    python tools/ladders.py --ladders 400
"""

from __future__ import annotations

import argparse

import numpy as np

from tfkit.tools.sweep.law import fit_law

E, A, EXPONENT, FIRST_SIZE = 1.2, 30.0, 0.3, 0.25e6
LADDERS = (
    (4, 5, 2.0, 0.003, 0.002, 0.0),
    (5, 6, 2.0, 0.005, 0.0, 0.0),
    (8, 2, 2.0, 0.003, 0.0, 0.0),
    (4, 2, 4.0, 0.003, 0.0, 0.0),
    (4, 3, 4.0, 0.003, 0.003, 0.0),
    (5, 3, 4.0, 0.001, 0.0, 0.003),
    (3, 6, 4.0, 0.003, 0.002, 0.0),
    (6, 1, 4.0, 0.003, 0.0, 0.0),
)
"""Sizes, seeds, ratio of sizes, and the standard deviations of runs, seeds and sizes, as fractions of the loss."""
LOWEST = 0.9
"""Lowest fraction that the script accepts."""


def coverage(sizes: int, seeds: int, ratio: float, run: float, seed: float, size: float, count: int) -> list[float]:
    """Return the fractions of ladders whose intervals contain E, A, a, and the mean loss at the next size."""
    random = np.random.default_rng((sizes, seeds))
    n = FIRST_SIZE * ratio ** np.arange(sizes + 1)
    hits = np.zeros(4)
    for _ in range(count):
        noise = run * random.normal(size=(len(n), seeds))
        noise += seed * random.normal(size=(1, seeds)) + size * random.normal(size=(len(n), 1))
        losses = (E + A * n**-EXPONENT)[:, None] * np.exp(noise)
        law = fit_law(n[:-1].tolist(), losses[:-1].tolist())
        intervals, forecast = law.parameter_intervals(), law.forecast_interval(n[-1])
        assert intervals is not None
        assert forecast is not None
        truths = (E, A, EXPONENT, losses[-1].mean())
        hits += [low <= true <= high for (low, high), true in zip((*intervals, forecast), truths, strict=True)]
    return (hits / count).tolist()


def main() -> int:
    """Print the fractions of all ladders; return 1 if one is too low."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ladders", type=int, default=400, help="the number of ladders of each sort")
    count, failed = parser.parse_args().ladders, False
    print("sizes seeds ratio    run   seed   size      E      A      a   next")
    for ladder in LADDERS:
        fractions = coverage(*ladder, count)
        sizes, seeds, ratio, *noises = ladder
        numbers = [*(f"{noise:7.3f}" for noise in noises), *(f"{fraction:7.3f}" for fraction in fractions)]
        print(f"{sizes:5} {seeds:5} {ratio:5g}{''.join(numbers)}", flush=True)
        failed |= min(fractions) < LOWEST
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

"""Results of runs whose numbers all differ, and their tables: each number stands in its column."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tfkit.run.sweep_spec import CompareConfig
from tfkit.tools.sweep import result
from tfkit.tools.sweep.comparison import Side, compare_sides
from tfkit.tools.sweep.result import (
    ArmResult,
    Curve,
    Forecast,
    Gain,
    Law,
    Reached,
    Results,
    Scaling,
    TrialResult,
    Tuned,
    curve_of,
)
from tfkit.tools.sweep.result_tables import show_results, verdict_text
from tfkit.tools.sweep.statistics import Paired

BASE = ((3.0, 2.5, 2.0), (3.1, 2.4, 2.2), (2.9, 2.6, 2.1))
WIDE = ((3.0, 2.2, 1.8), (3.1, 2.3, 2.0), (2.9, 2.5, 2.3))
"""Two of three seeds reach the baseline, at steps 6 and 5 1/3 of 8."""


def curve(seed: int, values: tuple[float, ...], scale: float) -> Curve:
    return Curve(seed, f"out/{scale}-{seed}", (0, 4, 8), values, scale * (seed + 1), int(scale) << (20 + seed % 2))


def side(name: str, values: tuple[tuple[float, ...], ...], scale: float, seeds: tuple[int, ...] = (0, 1, 2)) -> Side:
    size: Any = SimpleNamespace(parameters=1000 * scale, flops=10**6 * scale, tokens=7 * scale)
    return Side(name, name, "base", size, [curve(seed, values[seed], scale) for seed in seeds])


def test_results_are_computed_from_all_runs_of_an_arm() -> None:
    sides = [side("base", BASE, 100), side("wide", WIDE, 200), side("short", WIDE, 400, (1, 2))]
    (base, wide, short), notes = compare_sides(sides, CompareConfig(on="val.loss"))
    assert base.mean == pytest.approx(2.1)
    assert (base.speed, wide.speed, short.speed) == (200, 400, 1000)
    assert (base.memory, wide.memory, short.memory) == (200 << 20, 400 << 20, 800 << 20)
    assert wide.difference is not None
    assert (wide.difference.mean, wide.difference.lower) == (pytest.approx(-0.2 / 3), 2)
    assert wide.reached is not None
    assert (wide.reached.ratio, wide.reached.seeds) == (pytest.approx((6 / 8 * 16 / 3 / 8) ** 0.5), 2)
    assert short.difference is not None
    assert short.difference.mean == pytest.approx(0)
    assert notes[:2] == [
        "seed 0 of base has no pair in short: for the mean alone",
        "2 seeds, but a verdict needs at least 6: p is at least 0.500",
    ]


@pytest.mark.parametrize(("lower", "text"), [(True, "2 of 3 better"), (False, "2 of 3 worse")])
def test_a_verdict_of_few_seeds_counts_in_the_direction_of_the_metric(lower: bool, text: str) -> None:
    arms, _ = compare_sides([side("base", BASE, 1), side("wide", WIDE, 1)], CompareConfig(on="val.loss"))
    assert verdict_text(arms[1], lower=lower) == text


def results() -> Results:
    curves = tuple(curve(seed, values, 2.0) for seed, values in enumerate(BASE))
    base = ArmResult("base", "base", "base", 1_200_000, 34 * 10**12, 56_000, 2.1, 7890.0, 3 << 20, None, curves)
    wide = replace(
        base,
        name="wide",
        parameters=2_300_000,
        flops=45 * 10**12,
        tokens=67_000,
        mean=2.0333,
        speed=6543.0,
        memory=5 << 20,
        tuned=Tuned({"lr": 0.01}, ()),
        difference=Paired(7, -0.0667, 5, 2, (-0.2, 0.1), p=0.012, adjusted=0.034, deviation=0.2, correlation=0.87),
        reached=Reached(0.71, (0.5, 0.9), 2),
        verdict="better",
    )
    trials = (
        TrialResult("wide", {"lr": 0.01}, "lr 0.01", "val.loss", 2.25, True, 3, 0),
        TrialResult("wide", {"lr": 0.1}, "lr 0.1", "val.loss", None, False, 3, 2),
    )
    forecasts = Forecast(4e6, 1.7375, (1.625, 1.875)), Forecast(3e7, 1.5625, None)
    law = Law(1.5, 30.25, 0.375, ((1.25, 1.75), (20.5, 40.5), (0.25, 0.5)), 0.0625, *forecasts)
    laws = (Scaling("wide", "parameters", (1e6, 2e6, 4e6), ((2.0,), (1.9,), (1.8,)), law, (3,)),)
    gains = (
        Gain("wide", "base", 1e6, -0.0312, 1.375, (1.125, 1.625)),
        Gain("wide", "base", 3e7, -0.0625, None, (2.5, None)),
        Gain("wide", "base", 4e6, 0.0156, 0.875, None),
    )
    return Results("a sweep", "val.loss", True, None, (base, wide), trials, laws, gains, ("a note",), {})


@pytest.mark.parametrize("form", [None, "markdown"])
def test_each_number_stands_in_its_column(
    form: str | None,
    golden: Callable[[str, str], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    show_results(results(), form)
    golden(f"sweeps/numbers{'' if form is None else f'_{form}'}", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("losses", "diverged", "steps", "last"),
    [
        ((math.nan, 2.5, 2.0), False, (4, 8), 2.0),
        ((3.0, math.inf, 2.0), False, (0, 8), 2.0),
        ((3.0, 2.5, math.inf), True, (0, 4), math.nan),
    ],
)
def test_a_run_diverged_if_its_last_value_is_not_finite(
    losses: tuple[float, ...], diverged: bool, steps: tuple[int, ...], last: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"step": step, "val.loss": value} for step, value in zip((0, 4, 8), losses, strict=True)]
    sessions = [{"memory": 5}, {}, {"memory": 9}, {"memory": 7}]
    facts = SimpleNamespace(ended="finished", sessions=sessions, seconds_of_step=0.5, bits={})
    monkeypatch.setattr(result, "read_metric_lines", lambda folder: lines)
    monkeypatch.setattr(result, "_facts_of_run", lambda run: facts)
    run: Any = SimpleNamespace(seed=3, folder=Path("out"), run=SimpleNamespace(tokens_of_step=72))
    actual = curve_of(run, "val.loss")
    assert (actual.diverged, actual.steps, actual.memory, actual.speed) == (diverged, steps, 9, 144)
    assert actual.last == pytest.approx(last, nan_ok=True)

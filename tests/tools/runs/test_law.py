"""The scaling law in two variables, fitted to losses from a published law and to run folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.run.training.runs import RUN, write_run
from tfkit.cli import main
from tfkit.tools.runs import law as module
from tfkit.tools.runs.law import JointLaw, law_of

CHINCHILLA = (1.69, 406.4, 410.7, 0.34, 0.28)
"""E, A, B, a, b of table 3 and equation 10 in https://arxiv.org/abs/2203.15556."""
SIZES = list(product([44e6, 175e6, 0.7e9, 2.8e9, 11e9], [1e9, 5e9, 25e9, 125e9]))


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAWS", 6)


def losses(sizes: list[tuple[float, float]], noise: float = 0.0) -> list[float]:
    floor, a_scale, b_scale, a, b = CHINCHILLA
    exact = np.array([floor + a_scale * n**-a + b_scale * d**-b for n, d in sizes])
    values: list[float] = (exact * np.exp(noise * np.random.default_rng(1).normal(size=len(sizes)))).tolist()
    return values


def test_the_fit_to_losses_of_the_published_law_is_the_law() -> None:
    """The best number of parameters grows with compute^0.46, as in approach 3 of Chinchilla."""
    values = losses(SIZES)
    law = law_of(SIZES, values)
    assert (law.floor, *law.scales, *law.exponents) == pytest.approx(CHINCHILLA, rel=1e-3)
    assert law.growth == pytest.approx(0.46, abs=0.01)
    assert law.at(*SIZES[7]) == pytest.approx(values[7], rel=1e-6)


def test_the_omitted_run_has_the_most_compute() -> None:
    """With noise, so that each run differs from the law of the others by another amount."""
    excluded = (11e9, 25e9)  # neither the most parameters and tokens together, nor the last run
    sizes = [excluded, *(size for size in SIZES if size != excluded and size[0] * size[1] < excluded[0] * excluded[1])]
    assert max(sizes, key=sum) != excluded
    values = losses(sizes, 1e-2)
    expected = values[0] - law_of(sizes[1:], values[1:]).at(*excluded)
    assert law_of(sizes, values).missed == pytest.approx(expected, abs=1e-4)
    assert abs(expected) > 1e-3


def test_a_failed_run_does_not_decide_the_law_and_noise_is_in_the_intervals() -> None:
    values = losses(SIZES, 1e-3)
    values[6] *= 1.3
    law = law_of(SIZES, values)
    assert law.exponents == pytest.approx(CHINCHILLA[3:], rel=0.1)
    assert all(low < value < high for value, (low, high) in zip(CHINCHILLA, law.intervals, strict=True))


def test_each_number_of_a_law_stands_in_its_row(
    golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    intervals = ((1.5, 2.5), (300.0, 500.0), (350.0, 600.0), (0.25, 0.5), (0.125, 0.375))
    law = JointLaw(1.75, (406.5, 410.25), (0.34, 0.28), intervals, -0.0125, 12)
    monkeypatch.setattr(module, "law_of_runs", lambda *args: law)
    assert main(["runs", "out", "--fit"]) == 0
    golden("runs/law", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--fit --margin 0.1", "--fit cannot be combined with --margin"),
        ("--list --better lower", "--list cannot be combined with --better"),
        ("--list --fit", "--list cannot be combined with --fit"),
        ("--fit --so-far", "--fit cannot be combined with --so-far"),
        ("--list --markdown", "--list cannot be combined with --markdown"),
    ],
)
def test_an_option_without_effect_is_named(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "out", *options.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_runs_of_a_folder_have_a_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, RUN + "eval: {every: 4, splits: {val: {batches: 1}}}\n")
    monkeypatch.chdir(tmp_path)
    shape = ["model.decoder.ffn.d_ff={}", "steps={}"]
    pairs = [(4, 1), (8, 2), (32, 3), (32, 1), (4, 2), (8, 1)]
    for number, pair in enumerate(pairs):
        sets = [word for text, value in zip(shape, pair, strict=True) for word in ("--set", text.format(value))]
        assert main(["train", "small.yaml", "-o", f"out/{number}", *sets]) == 0
    folders = [f"out/{number}" for number in range(len(pairs))]
    capsys.readouterr()
    assert main(["runs", *folders, "--fit", "--json"]) == 0
    law = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in Path("out/2/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = next(line["val.loss"] for line in reversed(lines) if "val.loss" in line)
    assert law["runs"] == 6
    assert 0 < law["floor"] <= last
    assert main(["runs", *folders, "--fit"]) == 0
    assert "the best number of parameters grows with compute^" in capsys.readouterr().out
    assert main(["runs", *folders[:3], "--fit"]) == 1
    assert "got 3 runs, 3 numbers of parameters and 3 of tokens" in " ".join(capsys.readouterr().err.split())
    assert main(["runs", *folders, "--fit", "--list"]) == 2

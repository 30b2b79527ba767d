"""Positions of values in the range from which a search draws."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tfkit.run.sweep_spec import Range
from tfkit.tools.sweep.tuning import OptunaSearch, Tuning, _suggested_number, share_of

LINEAR, LOG = Range("linear", 0.0, 10.0), Range("log", 1e-4, 1.0)


@pytest.mark.parametrize(
    ("range", "value", "share"),
    [
        (LINEAR, 0.0, 0.0),
        (LINEAR, 2.5, 0.25),
        (LINEAR, 10.0, 1.0),
        (LOG, 1e-4, 0.0),
        (LOG, 1e-3, 0.25),
        (LOG, 1.0, 1.0),
    ],
)
def test_a_position_is_linear_on_the_scale(range: Range, value: float, share: float) -> None:
    assert share_of(range, value) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(
    ("value", "edge"), [(0.0, True), (0.19, True), (0.21, False), (5.0, False), (9.79, False), (9.81, True)]
)
def test_values_within_two_percent_of_an_end_are_at_the_edge(value: float, edge: bool) -> None:
    tune = SimpleNamespace(ranges={"optimizer.lr": LINEAR}, over={"optimizer.lr": LINEAR})
    tuning = cast(Any, SimpleNamespace(arms=SimpleNamespace(config=SimpleNamespace(tune=tune))))
    assert Tuning._at_edge(tuning, "optimizer.lr", value) is edge


@pytest.mark.parametrize(
    ("values", "edges"),
    [([3e-3, 1e-2, 1e-3, 3e-4], [1e-2, 3e-4]), (["b", "a", "c"], []), ([True, False], []), ([7], [7])],
)
def test_the_edges_of_a_list_are_its_smallest_and_largest_number(values: list[Any], edges: list[Any]) -> None:
    tune = SimpleNamespace(ranges={}, over={"optimizer.lr": values})
    tuning = cast(Any, SimpleNamespace(arms=SimpleNamespace(config=SimpleNamespace(tune=tune))))
    assert [value for value in values if Tuning._at_edge(tuning, "optimizer.lr", value)] == edges


class Suggestion:
    """Suggests the middle of a range, on its scale."""

    def suggest_float(self, path: str, low: float, high: float, *, log: bool) -> float:
        return float((low * high) ** 0.5 if log else (low + high) / 2)

    def suggest_int(self, path: str, low: int, high: int) -> int:
        return (low + high) // 2


def test_numbers_are_suggested_on_the_scale_of_their_range() -> None:
    ranges = LINEAR, LOG, Range("whole", 2, 9)
    assert [_suggested_number(Suggestion(), "optimizer.lr", range) for range in ranges] == [5.0, 0.01, 5]


def test_a_suggested_number_has_four_digits() -> None:
    assert _suggested_number(Suggestion(), "optimizer.lr", Range("linear", 1.23454, 1.23458)) == 1.235


def test_a_search_goes_on_until_its_last_trial_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    results = list[float]()
    study = SimpleNamespace(ask=lambda: None, tell=lambda _suggestion, rank: results.append(rank))
    trained = list[object]()
    monkeypatch.setattr("tfkit.tools.sweep.tuning._optuna_study", lambda config: study)
    monkeypatch.setattr("tfkit.tools.sweep.tuning.is_trained", lambda trial: trial in trained)
    monkeypatch.setattr(OptunaSearch, "outcome", lambda search, trial: (float(len(trained)), 0))
    monkeypatch.setattr(OptunaSearch, "rank", lambda search, mean: mean)
    config = SimpleNamespace(tune=SimpleNamespace(search=SimpleNamespace(trials=2)))
    arms = cast(Any, SimpleNamespace(config=config, file=SimpleNamespace(tuned=()), trial=lambda arm, choice: object()))
    search = OptunaSearch.of(arms, cast(Any, None))
    trained.append(search.trials[0])
    assert search.go_on() is True
    trained.append(search.trials[1])
    assert search.go_on() is False
    assert results == [1.0, 2.0]

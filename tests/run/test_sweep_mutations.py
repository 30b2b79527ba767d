"""Valid sweeps with a random mistake: rejected with a location, or still valid.

The text of a sweep that is accepted is compared with its values here, and the values with its runs, apart from the code
that makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfkit
from tests.run.training.runs import PLUGINS, RUN, write_run
from tests.spec.test_mutations import MUTATIONS, SETTINGS, VALUES, compare_field, misplaced_key, mutants_of
from tfkit.run.sweep_spec import CompareConfig, EqualConfig, FitConfig, SweepSpec, TuneConfig
from tfkit.spec.source import parse, plain_data
from tfkit.tools.sweep.sweep import Sweep

from .test_run_mutations import check_refusal

BASE = RUN + "eval: {every: 4, splits: {val: {batches: 2}}, metrics: [loss, accuracy]}\n"
PAIRED = """\
tfkit: 1
description: A question
base: small.yaml
variants:
  relu: {}
  swiglu: {model.decoder.ffn: {kind: swiglu, d_ff: 21}}
  deeper: {model: {graph: {decoder: {n_layers: 3}}}}
grid: {batch.sequences: [4, 5]}
seeds: [0, 1]
equal: {params: 60%, by: decoder.ffn.d_ff, tokens: 0.5%, time: 90%, device: a100}
tune: {over: {optimizer.lr: [1e-3, 1e-2]}, seeds: [9], steps: 4}
compare: {to: relu, on: val.loss, margin: 0.01}
"""
LADDER = """\
tfkit: 1
base: small.yaml
sizes: {params: [4k, 8000, 0.016M, 32k]}
tokens: 20 * params + 7
seeds: [3]
compare: {on: val.accuracy, better: higher}
fit: {loss: val.loss, on: params}
"""
TEXTS = [PAIRED, LADDER]
FIELDS = sorted(
    {name for config in (SweepSpec, EqualConfig, TuneConfig, CompareConfig, FitConfig) for name in config.model_fields}
)
MAX_ARMS = 24


def base_of(variant: str, to: str | None, variants: list[str]) -> str:
    """The variant that one is compared to."""
    if to != "previous":
        return to or variants[0]
    return next((before for before, after in pairwise(variants) if after == variant), variant)


MUTANTS = mutants_of(
    st.sampled_from(TEXTS), [*MUTATIONS, misplaced_key(FIELDS, [*VALUES, "5%", "val.loss", "[1, 2]", "{log: [1, 2]}"])]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps")
    write_run(folder, BASE)
    return folder


@pytest.fixture(scope="module")
def paired(folder: Path) -> Sweep:
    path = folder / "good.yaml"
    path.write_text(PAIRED, encoding="utf-8")
    return Sweep(path, PLUGINS, folder / "out")


def check(text: str, folder: Path) -> bool:
    """Whether the text is accepted; fails if it is neither refused properly nor right."""
    path = folder / "mutant.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        sweep = Sweep(path, PLUGINS, folder / "out")
    except tfkit.SpecError as error:
        check_refusal(error)
        return False
    check_text(text, sweep)
    return True


def check_text(text: str, sweep: Sweep) -> None:
    """Everything that the text says is in the sweep, and its runs are those of the text."""
    data, config = plain_data(parse(text, "sweep")), sweep.file.config
    for key, value in data.items():
        assert key in SweepSpec.model_fields, f"{key} is no key of sweeps"
        counted = key == "sizes" and value is not None
        part = {"params": [_count(parameter) for parameter in value["params"]]} if counted else value
        compare_field(part, config, key, "")
    check_runs(data, sweep)


def _count(text: object) -> int:
    """A number of parameters, read in another way."""
    word = str(text)
    return round(float(word.rstrip("kMB")) * 1000 ** " kMB".index(word[-1] if word[-1] in "kMB" else " "))


def check_runs(data: Mapping[str, Any], sweep: Sweep) -> None:
    arms = sweep.arms
    variants = data.get("variants") or {"base": {}}
    sizes = (data.get("sizes") or {"params": [None]})["params"]
    points = 1
    for values in (data.get("grid") or {}).values():
        points *= len(values)
    assert len(arms.arms) == len(variants) * len(sizes) * points
    assert {arm.variant for arm in arms.arms} == set(variants)
    assert len({arm.name for arm in arms.arms}) == len(arms.arms)
    for arm in arms.arms[:MAX_ARMS]:
        runs = [sweep_run.run for sweep_run in arms.runs(arm)]
        assert [run.config.seed for run in runs] == list(data["seeds"])
        assert len({run.steps for run in runs}) == 1
        assert arms.arm(arm.base).variant == base_of(arm.variant, data["compare"].get("to"), list(variants))
        if data.get("tokens") is not None:
            assert runs[0].config.tokens is not None
            assert 0 <= runs[0].steps * runs[0].tokens_of_step - runs[0].config.tokens < runs[0].tokens_of_step
        if "grid" in data and "batch.sequences" in (data["grid"] or {}):
            assert runs[0].config.batch.sequences in data["grid"]["batch.sequences"]
    tune = data.get("tune")
    rows = [row for row in sweep.outline().rows if row.name.endswith(", tuning")]
    assert len(rows) == (len(arms.arms) if tune else 0)
    for row in rows:
        tries = (tune.get("search") or {}).get("trials")
        if tries is None:
            tries = 1
            for values in tune["over"].values():
                tries *= len(values)
        assert row.runs == tries * len(tune["seeds"])


pytestmark = pytest.mark.filterwarnings("ignore::tfkit.errors.SpecWarning", "ignore::tfkit.errors.FirstLossWarning")


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS, ids=["paired", "ladder"])
def test_the_originals_are_right(text: str, folder: Path) -> None:
    assert check(text, folder)


@settings(SETTINGS, max_examples=15, derandomize=True)
@given(MUTANTS)
def test_mutants_of_sweeps(folder: Path, text: str) -> None:
    check(text, folder)


@pytest.mark.slow
@settings(SETTINGS, max_examples=300)
@given(MUTANTS)
def test_many_mutants_of_sweeps(folder: Path, text: str) -> None:
    check(text, folder)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace("seeds: [0, 1]", "seeds: [1]"),
        lambda text: text.replace("1e-2]", "1e-2, 1]"),
        lambda text: text.replace("sequences: [4, 5]", "sequences: [4, 6]"),
        lambda text: text.replace("to: relu", "to: swiglu"),
    ],
)
def test_the_oracle_sees_a_sweep_that_means_something_else(spoil: Callable[[str], str], paired: Sweep) -> None:
    assert spoil(PAIRED) != PAIRED
    with pytest.raises(AssertionError):
        check_text(spoil(PAIRED), paired)

"""`tfkit check RUN`: a correct run has every property, and each planted bug breaks the property that is named."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

import tfkit
from tfkit.run.checked_run import load_run
from tfkit.run.read_run import shipped_runs
from tfkit.tools.check.check import outcomes
from tfkit.tools.check.measure import Outcome
from tfkit.tools.check.properties.all import PROPERTIES
from tfkit.tools.check.run_under_test import RunUnderTest, reduced_run
from tfkit.tools.cost.of_run import flops_of_step

from ...run.training.runs import WITH_MIXERS

PLUGINS = tfkit.load_plugins(entry_points=False)
RUN: Mapping[str, Any] = {
    "tfkit": 1,
    "name": "small",
    "model": {
        "vocab_size": "data.vocab_size",
        "d_model": 16,
        "dropout": 0.1,
        "graph": {
            "embedding": {"block": "embedding", "position": {"kind": "learned", "max_len": 8}},
            "decoder": {
                "block": "decoder",
                "n_layers": 1,
                "attention": {"kind": "mha", "n_heads": 2},
                "ffn": {"kind": "relu", "d_ff": 32},
            },
            "head": "lm_head",
        },
    },
    "data": {"kind": "addition", "digits": 2},
    "batch": {"sequences": 4},
    "steps": 50,
    "optimizer": {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.1},
    "schedule": {"kind": "wsd", "warmup": 5, "decay": 10},
    "eval": {"every": 2, "splits": {"val": "all"}, "metrics": ["loss", "exact_match"]},
}
MUON = {"kind": "muon", "lr": 0.02, "others": {"kind": "adamw", "lr": 3e-3}}
OF_STEPS = "steps sums noise clipping schedule rates groups decay optimizer examples passes".split()  # noqa: SIM905


@cache
def subject(**changes: str) -> RunUnderTest:
    """The run, with values of other keys."""
    sets = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
    return reduced_run(load_run(RUN, PLUGINS, sets=sets), PLUGINS)


def measured(checked: RunUnderTest, *names: str) -> dict[str, Outcome]:
    properties = [prop for prop in PROPERTIES if prop.of == "run" and (not names or prop.name in names)]
    return {outcome.name: outcome for outcome in outcomes(checked, properties)}


def broken(checked: RunUnderTest, *names: str) -> dict[str, str]:
    return {name: result.fault for name, result in measured(checked, *names).items() if result.status != "ok"}


def test_steps_of_a_correct_run() -> None:
    assert broken(subject(), *OF_STEPS) == {}


@pytest.mark.slow
def test_records_of_a_correct_run() -> None:
    assert broken(subject()) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped_runs())
def test_shipped_runs(name: str) -> None:
    checked = reduced_run(load_run(name, WITH_MIXERS, count=flops_of_step), WITH_MIXERS)
    assert {name: result.fault for name, result in measured(checked).items() if result.status == "failed"} == {}

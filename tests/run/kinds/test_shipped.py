"""Every run that comes with tfkit is valid, and trains at a reduced size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tfkit
from tfkit.cli import main
from tfkit.run.checked_run import load_run

from ...known import RUNS
from ...sampling import chosen
from ..training.runs import PLUGIN_OPTIONS, WITH_PLUGINS

FAST = ("batch.sequences=2", "checkpoint.every=null", "eval.every=2", "eval.splits={val: {batches: 1}}", "steps=3")
SMALL_RUNS = {
    "addition": ("schedule.warmup=2",),
    "calculator": ("data.problems=100", "data.test=4", "model.decoder.n_layers=1"),
    "calculator_exact": ("data.problems=100", "data.test=4", "model.decoder.n_layers=1", "schedule.warmup=2"),
    "hybrid_recall": ("schedule.warmup=2", "data.pairs=4"),
    "hybrid_text": ("schedule.warmup=2", "batch.length=16"),
    "diffusion_addition": ("schedule.warmup=2",),
    "dit_shapes": ("schedule.warmup=2", "data.count=60", "model.encoder.n_layers=1"),
    "jepa_shapes": ("schedule.warmup=2", "data.count=60", "model.encoder.n_layers=1"),
    "masked": ("schedule.warmup=2", "model.encoder.n_layers=1"),
    "minigpt_relu": ("model.decoder.n_layers=1",),
    "minigpt_swiglu": ("model.decoder.n_layers=1",),
    "nanogpt_char": ("schedule.warmup=2", "model.d_model=48", "model.decoder.n_layers=1", "batch.length=16"),
    "numerals": ("schedule.warmup=2", "data.numbers=60", "model.query_encoder.n_layers=1"),
    "preferred_sums": ("schedule.warmup=2",),
    "reverse": ("schedule.warmup=2", "data.sequences=500"),
    "t5_spans": ("schedule.warmup=2", "model.encoder.n_layers=1", "batch.length=20"),
    "waves": ("schedule.warmup=2",),
}
STEPS = {
    "addition": 1000,
    "calculator_exact": 100_000,
    "diffusion_addition": 1200,
    "dit_shapes": 1000,
    "hybrid_recall": 400,
    "hybrid_text": 300,
    "jepa_shapes": 1000,
    "numerals": 400,
    "preferred_sums": 1000,
    "reverse": 3000,
    "t5_spans": 1000,
    "waves": 1000,
}
METRICS = {
    "diffusion_addition": "val.decoded_exact_match",
    "dit_shapes": "val.objective",
    "jepa_shapes": "val.objective",
    "numerals": "val.objective",
    "preferred_sums": "val.reward_accuracy",
    "waves": "val.r2",
}
"""Metrics of runs without `val.loss`."""
VARIED = (
    *("addition", "diffusion_addition", "dit_shapes", "hybrid_recall", "hybrid_text", "jepa_shapes", "masked"),
    *("numerals", "preferred_sums", "reverse", "t5_spans", "waves"),
)
"""Runs whose models state no number of parameters."""


def test_all_are_known() -> None:
    assert sorted([*SMALL_RUNS, "finetune_addition"]) == RUNS  # which begins with the weights of another run


@pytest.mark.parametrize("name", chosen(SMALL_RUNS, {"masked"}))
def test_it_trains(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [word for change in (*FAST, *SMALL_RUNS[name]) for word in ("--set", change)]
    assert (
        main(
            [
                "train",
                name,
                "-o",
                str(tmp_path / "out"),
                *sets,
                "--json",
                *PLUGIN_OPTIONS,
            ]
        )
        == 0
    ), capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    metric = METRICS.get(name, "val.loss")
    assert [line["step"] for line in lines if metric in line] == [0, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_RUNS)
def test_its_size_is_the_published_one(name: str) -> None:
    run = load_run(name, WITH_PLUGINS)
    assert run.steps == STEPS.get(name, 5000)
    count = sum(parameter.numel() for parameter in tfkit.build(run.graph, device="meta").parameters())
    assert run.file.model.model.parameters == (None if name in VARIED else count)

"""Families of tfkit-streams: scripted, ejected, and generation from prompts of different lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

import tfkit
from tfkit.tools.eject.proof import check

from ..sampling import chosen
from .case import Trial
from .streams import STREAMS


@pytest.mark.parametrize("name", chosen(STREAMS, set()))
def test_exported_and_ejected_models_are_the_model(name: str, tmp_path: Path) -> None:
    trial = Trial.of(STREAMS[name], tmp_path)
    exported = tfkit.export(trial.ours, tmp_path / "model.ts")
    assert exported.difference <= 1e-5
    assert sum("by cached decoding" in case.case for case in exported.checks) == 3
    graph = trial.ours.meta["graph"]
    assert check(graph, tfkit.eject(graph)).ran
    prompts = [[5, 9, 3, 17, 20, 8], [11], [7, 30, 4]]
    batch = tfkit.generate(trial.ours, prompts, max_new_tokens=6).tokens.tolist()
    assert batch == [tfkit.generate(trial.ours, [prompt], max_new_tokens=6).tokens[0].tolist() for prompt in prompts]

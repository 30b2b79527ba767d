"""docs/hybrids.md with its plugin: its spec is the model of the shipped runs, and its sweep the shipped sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

import tfkit
from tests.run.training.runs import WITH_PLUGINS
from tfkit.run.checked_run import load_run
from tfkit.tools.sweep.sweep import Sweep

from .page import ROOT, follow, run


def digests(name: str | Path) -> dict[str, list[str]]:
    arms = Sweep(name, WITH_PLUGINS, Path("out")).arms
    return {arm.name: [sweep_run.run.digest for sweep_run in arms.runs(arm)] for arm in arms.arms}


@pytest.mark.slow
def test_the_page_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"COLUMNS": "80", "NO_COLOR": "1", "TFKIT_DISABLE": "tfkit-mla,tfkit-moe"}.items():
        monkeypatch.setenv(name, value)
    follow(ROOT / "docs" / "hybrids.md", tmp_path, lambda command: run(command, capsys.readouterr))
    spec = tfkit.load("hybrid.yaml", plugins=WITH_PLUGINS)
    assert spec.spec.model.graph == load_run("hybrid_text", WITH_PLUGINS).graph.spec.model.graph
    assert digests("text.yaml") == digests("hybrid_text")

"""A new run file trains without changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.training.runs import PLUGINS
from tfkit.cli import main
from tfkit.run.checked_run import load_run

from ...sampling import slow

SHORT_RUN = ["--set", "steps=2", "--set", "schedule.warmup=1", "--set", "eval.splits.val.batches=1"]
TINY = "{extends: char_swiglu, name: tiny, d_model: 16, max_len: 24, graph: {decoder: {n_layers: 1}}}\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_new_run_trains_a_spec_by_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tiny.yaml").write_text(TINY, encoding="utf-8")
    Path("runs").mkdir()
    assert main(["new", "run", "tiny.yaml", "-o", "runs/first.yaml"]) == 0
    assert main(["train", "runs/first.yaml", "-o", "out", *SHORT_RUN]) == 0
    run = load_run("runs/first.yaml", PLUGINS)
    assert (run.config.name, run.config.batch.length, run.graph.name) == ("train_tiny", 24, "tiny")
    assert main(["new", "run", "tiny.yaml", "-o", "runs/first.yaml"]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(("spec", "kind"), [("bert_base", "masked"), slow(("vaswani_base", "copy"))])
def test_the_data_fits_the_blocks(spec: str, kind: str) -> None:
    assert main(["new", "run", spec]) == 0
    assert load_run("run.yaml", PLUGINS).config.data.kind_name() == kind


def test_a_model_without_data_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "run", "tiny", "--slot", "ffn"]) == 2
    capsys.readouterr()
    Path("small.yaml").write_text(TINY.replace("name: tiny", "name: small, vocab_size: 12"), encoding="utf-8")
    assert main(["new", "run", "small.yaml"]) == 1
    assert "no data that comes with tfkit fits the model `small.yaml`" in capsys.readouterr().err
    assert not Path("run.yaml").exists()

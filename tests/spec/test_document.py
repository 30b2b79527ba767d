"""A file of the wrong type is a single error, which names the command for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.training.runs import RUN, write_run
from tfkit.cli import main

SWEEP = "tfkit: 1\nbase: small.yaml\nseeds: [0]\ncompare: {on: val.loss}\n"
MODEL = "tfkit: 1\nname: m\ngraph: {embedding: {block: embedding, vocab_size: 9, d_model: 8}}\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    for name, text in {"model": MODEL, "run": RUN, "sweep": SWEEP}.items():
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "extends.yaml").write_text("extends: model.yaml\n", encoding="utf-8")
    (tmp_path / "model_of_run.yaml").write_text("extends: run.yaml\nd_model: 8\n", encoding="utf-8")
    (tmp_path / "base.yaml").write_text(SWEEP.replace("small", "model"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "file", "text"),
    [
        ("show", "model_of_run.yaml", "`run.yaml` must be a model; got a run"),
        ("show", "sweep.yaml", "`sweep.yaml` must be a model; got a sweep"),
        ("train", "model.yaml", "`model.yaml` must be a run; got a model"),
        ("train", "sweep.yaml", "`sweep.yaml` must be a run; got a sweep"),
        ("train", "extends.yaml", "`model.yaml` must be a run; got a model"),
        ("sweep", "model.yaml", "`model.yaml` must be a sweep; got a model"),
        ("sweep", "run.yaml", "`run.yaml` must be a sweep; got a run"),
        ("sweep", "base.yaml", "`model.yaml` must be a run; got a model"),
    ],
)
def test_another_sort(command: str, file: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), file]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {text}\n  --> ")
    assert error.count("error:") == 1
    right = {"model": "show", "run": "train", "sweep": "sweep"}[text.split("; got a ")[1]]
    assert error.endswith(f"= help: read it with `tfkit {right}`\n")


def test_a_document_of_two_sorts_has_the_errors_of_the_one_that_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(f"{RUN}graph: {{}}\n", encoding="utf-8")
    assert main(["train", "run.yaml"]) == 1
    assert "unknown key `graph`" in capsys.readouterr().err

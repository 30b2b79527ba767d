"""`tfkit sample`: samples of a trained run as a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import tfkit
from tests.run.kinds.test_flow_matching import shapes_run
from tests.run.training.runs import PLUGIN_OPTIONS, WITH_PLUGINS, small_run
from tfkit.cli import main
from tfkit.spec.folder import model_folder
from tfkit.tools.train.train import train_run

ERRORS = {
    ("--label", "8"): "`labels` must be 2 classes below 8; got 8, 8",
    ("--length", "5"): "`length` has no effect",
    ("--label", "1", "--guidance", "2", "--set", "loss.drop=0"): "`--guidance` must have a model",
}


def sampled(*arguments: str) -> int:
    return main(["sample", "out", "-o", "samples.npy", *arguments, *PLUGIN_OPTIONS])


def test_samples_are_those_of_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = shapes_run("loss.scale=700", "steps=1", "eval=null", "schedule=constant")
    train_run(run, tmp_path / "out", WITH_PLUGINS, command="test")
    capsys.readouterr()
    for arguments, message in ERRORS.items():
        assert sampled("--samples", "2", "--steps", "1", *arguments) == 1
        assert message in capsys.readouterr().err
        assert not Path("samples.npy").exists()
    arguments = ("--samples", "3", "--label", "5", "--label", "2", "--guidance", "2", "--steps", "4", "--seed", "6")
    assert sampled(*arguments, "--method", "heun", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"file": "samples.npy", "shape": [3, 16, 16]}
    model = tfkit.build(run.graph, weights=model_folder(tmp_path / "out"))
    flow = tfkit.FlowModel(model, label="label", scale=700.0)
    expected = tfkit.sample_flow(flow, 3, steps=4, method="heun", labels=[5, 2, 5], guidance=2.0, seed=6)
    torch.testing.assert_close(torch.from_numpy(np.load("samples.npy")), expected)


def test_a_run_of_another_loss_has_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["sample", "small.yaml", "-o", "samples.npy", "--no-plugins"]) == 1
    assert "samples must come from a run with the loss `flow_matching`" in capsys.readouterr().err
    assert main(["sample", "small.yaml", "-o", "samples.npy", "--guidance", "2", "--no-plugins"]) == 2
    assert "--guidance has no effect without a class: add a --label" in capsys.readouterr().err
    assert main(["sample", "small.yaml", "-o", "samples.png", "--no-plugins"]) == 2
    assert "`samples.png` must end in .npy" in capsys.readouterr().err

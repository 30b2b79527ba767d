"""Every command that reads a model accepts a run folder, and uses its latest checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor

import tfkit
from tests.run.training.runs import write_run
from tfkit.cli import main
from tfkit.tools.eject.runner import build_model, loaded_module
from tfkit.tools.eject.write import eject

LAST = "out/step-8"
TOKENS = torch.randint(27, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    words = ["--set", "checkpoint={every: 4}", "--json"]
    assert main(["train", str(folder / "small.yaml"), "-o", str(folder / "out"), *words]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def result_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def logits() -> Tensor:
    """Those of the weights in the file of the latest checkpoint."""
    model = tfkit.build(f"{LAST}/spec.yaml").eval()
    model.load_state_dict(load_file(f"{LAST}/model.safetensors"))
    with torch.no_grad():
        return model(TOKENS)


def test_build() -> None:
    with torch.no_grad():
        assert torch.equal(tfkit.build("out").eval()(TOKENS), logits())
        assert not torch.allclose(tfkit.build("out/step-4").eval()(TOKENS), logits())


def test_generate(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "3 sheep", "--max-new-tokens", "5", "--temperature", "0"]
    newest = result_of(capsys, "generate", "out", *words)["texts"]
    assert newest == result_of(capsys, "generate", LAST, *words)["texts"]
    weights = ["--weights", f"{LAST}/model.safetensors", "--tokenizer", f"{LAST}/chars.json"]
    assert newest == result_of(capsys, "generate", f"{LAST}/spec.yaml", *weights, *words)["texts"]


@pytest.mark.slow
def test_export(capsys: pytest.CaptureFixture[str]) -> None:
    result_of(capsys, "export", "out", "--format", "torchscript", "-o", "model.pt")
    torch.testing.assert_close(torch.jit.load("model.pt")(TOKENS), logits())


@pytest.mark.slow
def test_eject() -> None:
    with loaded_module(eject(tfkit.load("out"))) as module:
        model = build_model(module).eval()
    load_model(model, f"{LAST}/model.safetensors")
    with torch.no_grad():
        assert torch.equal(model(TOKENS), logits())


def test_save(capsys: pytest.CaptureFixture[str]) -> None:
    result_of(capsys, "save", "out", "--layout", "tfkit", "-o", "saved")
    with torch.no_grad():
        assert torch.equal(tfkit.build("saved").eval()(TOKENS), logits())
    assert Path("saved/chars.json").read_bytes() == Path(LAST, "chars.json").read_bytes()


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert result_of(capsys, "compare", LAST, "out")["difference"] == 0
    assert result_of(capsys, "compare", "out", LAST)["difference"] == 0
    capsys.readouterr()
    assert main(["compare", "out/step-4", "out", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["difference"] > 1e-3


def test_params(capsys: pytest.CaptureFixture[str]) -> None:
    assert result_of(capsys, "params", "out") == result_of(capsys, "params", LAST)


def test_eval(capsys: pytest.CaptureFixture[str]) -> None:
    newest, older = (
        result_of(capsys, "eval", "out", "--weights", f"out/step-{step}/model.safetensors")["out"] for step in (8, 4)
    )
    assert result_of(capsys, "eval", "out")["out"] == newest
    assert older["val.loss"] != newest["val.loss"]

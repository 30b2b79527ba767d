"""`tfkit export`: its output, its arguments, and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tfkit
from tfkit.tools.export.command import DEPRECATED

from ..conftest import DECODER

Run = Callable[..., str]


@pytest.fixture(autouse=True)
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(DECODER)


def test_what_it_prints(
    capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tfkit.cli import main

    assert main(["export", "small.yaml", "-o", "small.ts", "--no-plugins"]) == 0
    out, err = capsys.readouterr()
    assert err == f"{DEPRECATED}\n"
    size = out.partition("torchscript, ")[2].partition("\n")[0]
    golden("cli/export", out.replace(size, "(size)"))


def test_json_and_weights(run: Run) -> None:
    model = tfkit.build("small.yaml", seed=7)
    save_file(model.state_dict(), "weights.safetensors")
    arguments = ("export", "small.yaml", "--weights", "weights.safetensors", "--json", "-o", "again.safetensors")
    report = json.loads(run(*arguments))
    assert (report["format"], report["files"], report["difference"]) == ("safetensors", ["again.safetensors"], 0)
    again = tfkit.build("small.yaml")
    tfkit.load_weights(again, "again.safetensors")
    assert torch.equal(again.embedding.tokens.weight, model.embedding.tokens.weight)


def test_weights_of_another_model(run: Run) -> None:
    save_file(tfkit.build("small.yaml", sets=["decoder.n_layers=1"]).state_dict(), "weights.safetensors")
    text = run("export", "small.yaml", "--weights", "weights.safetensors", "-o", "a.ts", status=1, stderr=True)
    assert "decoder.layers.1" in text
    assert "Traceback" not in text
    assert not Path("a.ts").exists()


def test_errors_come_before_any_work(run: Run) -> None:
    assert "does not name a format" in run("export", "small.yaml", "-o", "a.bin", status=1, stderr=True)
    assert "does not exist" in run("export", "small.yaml", "-o", "no/a.ts", status=1, stderr=True)
    assert "--output" in run("export", "small.yaml", status=2, stderr=True)
    assert [path.name for path in Path().iterdir()] == ["small.yaml"]


def test_formats_are_listed(run: Run) -> None:
    names = ["torchscript", "pt2", "aoti", "onnx", "safetensors"]
    assert [load["format"] for load in json.loads(run("export", "--formats", "--json"))] == names
    assert "torchscript   .ts .pt        built in   loaded by C++" in run("export", "--formats")
    text = run("export", "small.yaml", "-o", "a.bin", "--format", "onx", status=1, stderr=True)
    assert f"error: unknown format `onx`\n   = known: {', '.join(names)}\n" in text
    assert "`onnx`" in text

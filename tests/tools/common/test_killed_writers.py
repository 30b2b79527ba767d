"""Every command that writes, killed before each system call: complete old or new contents, no leftover files."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file

import tfkit
from tfkit.cli import main
from tfkit.tools.common.atomic_files import fresh_folder, write_file

from ...sampling import chosen
from ..conftest import DECODER
from .moments import moments, restored, state_of

PUBLISHED = Path(__file__).parents[2] / "published"


def of_folder(path: Path) -> Any:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def of_weights(path: Path) -> Any:
    return {name: tensor.sum().item() for name, tensor in load_file(path).items()}


def of_torchscript(path: Path) -> Any:
    return sum(tensor.sum() for tensor in torch.jit.load(path).state_dict().values()).item()


def of_pt2(path: Path) -> Any:
    return sum(tensor.sum() for tensor in torch.export.load(path).state_dict.values()).item()


def of_onnx(path: Path) -> Any:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(path)
    (parts,) = [prop.value for prop in model.metadata_props if prop.key == "parts"]
    graphs = [onnx.load(path.parent / parts / name) for name in ("prefill.onnx", "decode.onnx")]
    return [sum(len(tensor.raw_data) for tensor in prop.graph.initializer) for prop in (model, *graphs)]


Read = Callable[[Path], Any]
WRITERS: dict[str, tuple[list[str], str, Read]] = {
    "build": (["build", "spec.yaml", "--force"], "out", of_folder),
    "save": (["save", "spec.yaml", "--weights", "w.safetensors", "--layout", "tfkit", "--force"], "out", of_folder),
    "save huggingface": (
        ["save", "gpt2.yaml", "--weights", "g.safetensors", "--layout", "huggingface", "--force"],
        "out",
        of_folder,
    ),
    "profile": (
        ["profile", "spec.yaml", "--mode", "prefill", "--steps", "2", "--warmup", "0", "--length", "4"],
        "out",
        lambda path: json.loads((path / "profile.json").read_text())["profiles"][0]["step"],
    ),
    "torchscript": (["export", "spec.yaml"], "a.ts", of_torchscript),
    "pt2": (["export", "spec.yaml"], "a.pt2", of_pt2),
    "onnx": (["export", "spec.yaml"], "a.onnx", of_onnx),
    "safetensors": (["export", "spec.yaml"], "a.safetensors", of_weights),
    "eject": (["eject", "spec.yaml"], "a.py", lambda path: ast.dump(ast.parse(path.read_text()))),
    "draw": (["draw", "spec.yaml"], "a.svg", lambda path: ElementTree.fromstring(path.read_text()).get("viewBox")),
    "solve": (["solve", "spec.yaml", "--params", "9856"], "a.yaml", lambda path: path.read_text()),
    "import": (["import", str(PUBLISHED / "distilgpt2.json")], "a.yaml", lambda path: tfkit.load(path).name),
    "schema": (["schema"], "a.json", lambda path: json.loads(path.read_text())["title"]),
}
CHANGES = {
    "import": ["--name", "new"],
    "draw": ["--set", "decoder.placement=post"],
    "solve": ["--set", "decoder.dropout=0.25"],
}
"""What makes the second of two runs another one, where it is not the width."""
QUICK_WRITERS = ("safetensors",)


@pytest.mark.parametrize("name", chosen(WRITERS, QUICK_WRITERS))
def test_killed_at_every_moment(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command, target, records = WRITERS[name]
    Path("spec.yaml").write_text(DECODER)
    Path("gpt2.yaml").write_text("extends: gpt2\nd_model: 12\nvocab_size: 20\nmax_len: 8\n")
    if name.startswith("save"):
        spec, weights = command[1], command[3]
        assert main(["export", spec, "-o", weights, "--no-plugins"]) == 0
    (tmp_path / "home").mkdir()
    output = tmp_path / "home" / target
    run = [*command, "-o", str(output), "--no-plugins"]
    assert main(run) == 0, capsys.readouterr()
    expected = [records(output)]
    with moments(tmp_path / "home") as states:
        assert main([*run, *changes_of(name)]) == 0, capsys.readouterr()
    expected.append(records(output))
    assert name == "schema" or expected[0] != expected[1]
    assert len(states) > 8
    for number, state in enumerate(states):
        home = restored(state, tmp_path / str(number))
        assert records(home / target) in expected
        again(home / target)
        assert sorted(path.name for path in home.iterdir()) == [target]
    assert [path.name for path in (tmp_path / "home").iterdir() if ".parts-" not in path.name] == [target]


def changes_of(name: str) -> list[str]:
    if name.startswith("save"):
        return ["--dtype", "bfloat16"]
    return CHANGES.get(name, [] if name in ("schema", "profile") else ["--set", "d_model=32"])


def again(path: Path) -> None:
    """The next run that writes to a place, without what it costs."""
    if path.is_dir():
        with fresh_folder(path) as new:
            (new / "a").touch()
    else:
        write_file(path, "new")
    assert state_of(path.parent)

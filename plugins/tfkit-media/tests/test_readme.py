"""The README is true: its commands print what it shows, its tables have all blocks and specs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tfkit_media.shapes import draw

from tfkit.cli import main

from .models import PLUGINS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SPECS = ROOT / "src/tfkit_media/specs"
COMMANDS = [
    pair
    for block in re.findall(r"^```console\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    for pair in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    if "shapes" not in pair[0] and "captions" not in pair[0]
]
RUN, LATE, CAPTIONS = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_tables_have_all_blocks_and_specs() -> None:
    kinds = PLUGINS.registry.kinds("block").items()
    blocks = {name for name, kind in kinds if kind.config.__module__.startswith("tfkit_media")}
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)) == blocks
    rows = dict(re.findall(r"^\| .+? \| `(\w+)` \| ([\w-]+) \|$", TEXT, re.MULTILINE))
    files = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in SPECS.glob("*.yaml")}
    families = {name: spec.get("checkpoint") for name, spec in files.items()}
    assert rows == {name: family for name, family in families.items() if isinstance(family, str)}
    assert all(f"`{name}`" in TEXT for name in files)
    assert set(rows.values()) == {path.stem for path in SPECS.glob("families/*.yaml")}


@pytest.mark.parametrize(("command", "output"), COMMANDS)
def test_commands_print_what_is_shown(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    program, *arguments = shlex.split(command)
    assert program == "tfkit"
    status = main([*arguments, "--plugin-dir", str(ROOT), "--no-plugins"])
    captured = capsys.readouterr()
    assert status == int(output.startswith("error:"))
    pattern = re.escape(output.rstrip("\n")).replace(r"\.\.\.", "(?:.*)")
    printed = "\n".join(line.rstrip() for line in (captured.out + captured.err).splitlines())
    assert re.fullmatch(f"{pattern}\n*", printed, re.DOTALL), printed


def test_patches_of_a_processor_become_images() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pixels = np.random.default_rng(0).integers(0, 256, (3, 224, 224, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil(do_resize=False, image_mean=[0.0] * 3, image_std=[1.0] * 3)
    (code,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    values = {"pixel_values": processor(list(pixels), return_tensors="pt")["pixel_values"]}
    exec(code, values)
    expected = torch.from_numpy(pixels).permute(0, 3, 1, 2)[:, None] / 255
    torch.testing.assert_close(values["images"], expected)


@pytest.mark.slow
def test_the_run_learns_to_describe_shapes(tmp_path: Path) -> None:
    (tmp_path / "captions.yaml").write_text(CAPTIONS, encoding="utf-8")
    (tmp_path / "shapes").mkdir()
    for name, array in draw(4000).items():
        np.save(tmp_path / f"shapes/{name}.npy", array)
    plugins = ["--plugin-dir", str(ROOT), "--no-plugins"]
    assert main(["train", str(tmp_path / "captions.yaml"), "-o", str(tmp_path / "run"), *plugins]) == 0
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    accuracy = [line["val.accuracy"] for line in lines if "val.accuracy" in line]
    assert accuracy[0] < 0.5  # a description without the image: at most (1 + 1/2 + 1/2 + 1/8) / 4
    assert accuracy[-1] > 0.95


@pytest.mark.slow
def test_the_run_learns_to_name_shapes(tmp_path: Path) -> None:
    Path(tmp_path / "shapes.yaml").write_text(RUN, encoding="utf-8")
    (tmp_path / "shapes").mkdir()
    for name, array in draw(4000).items():
        np.save(tmp_path / f"shapes/{name}.npy", array)
    status = main(
        ["train", str(tmp_path / "shapes.yaml"), "-o", str(tmp_path / "run"), "--plugin-dir", str(ROOT), "--no-plugins"]
    )
    assert status == 0
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    accuracy = [line["val.accuracy"] for line in lines if "val.accuracy" in line]
    assert accuracy[0] < 0.3
    assert accuracy[-1] > 0.9


def test_queries_find_documents_by_late_interaction(tmp_path: Path) -> None:
    run = tmp_path / "tokens.yaml"
    run.write_text(LATE, encoding="utf-8")
    plugins = ["--plugin-dir", str(ROOT), "--no-plugins"]
    sets = [f"--set={change}" for change in ("steps=2", "batch.sequences=4", "eval.every=2")]
    assert main(["train", str(run), "-o", str(tmp_path / "out"), *sets, *plugins]) == 0
    lines = map(json.loads, (tmp_path / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert len([line for line in lines if "val.matches" in line]) == 2

"""The README is true: its spec runs, its commands print what it shows, its tables have all kinds and specs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

import tfkit
from tfkit.cli import main

from .test_streams import PLUGINS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```(yaml|console)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
SPECS = ROOT / "src/tfkit_streams/specs"


def test_every_block_is_tested() -> None:
    assert len(BLOCKS) == TEXT.count("```") / 2


def test_the_spec_is_the_shipped_one() -> None:
    spec, shipped = (yaml.safe_load(text) for text in (BLOCKS["yaml"], (SPECS / "dit_small.yaml").read_text("utf-8")))
    assert spec["graph"] == shipped["graph"]
    model = tfkit.build(tfkit.loads(BLOCKS["yaml"], plugins=PLUGINS), device="meta")
    patches, times = torch.empty(2, 256, 16, device="meta"), torch.empty(2, 256, device="meta")
    assert model(patches, times).shape == (2, 256, 32)


def test_tables_have_all_kinds_and_specs() -> None:
    kinds = set(PLUGINS.registry.kinds("residual")) - {"add"}
    assert set(re.findall(r"^\| `(\w+)` \|.*\|.*\|$", TEXT, re.MULTILINE)) == kinds
    assert set(re.findall(r"^\| `(\w+)` \| [^|]*\|$", TEXT, re.MULTILINE)) == {
        path.stem for path in SPECS.glob("*.yaml")
    }


@pytest.mark.parametrize(
    ("command", "output"), re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", BLOCKS["console"], re.MULTILINE)
)
def test_commands_print_what_is_shown(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("noise.yaml").write_text(BLOCKS["yaml"], encoding="utf-8")
    program, *arguments = shlex.split(command)
    assert program == "tfkit"
    status = main([*arguments, "--plugin-dir", str(ROOT), "--no-plugins"])
    captured = capsys.readouterr()
    assert status == int(output.startswith("error:"))
    pattern = re.escape(output.rstrip("\n")).replace(r"\.\.\.", "(?:.*)")
    printed = "\n".join(line.rstrip() for line in (captured.out + captured.err).splitlines())
    assert re.fullmatch(f"{pattern}\n*", printed, re.DOTALL), printed

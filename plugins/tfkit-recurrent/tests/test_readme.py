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

from .mixers import PLUGINS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```(yaml|console)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
SPECS = ROOT / "src/tfkit_recurrent/specs"


def test_every_block_is_tested() -> None:
    assert len(BLOCKS) == TEXT.count("```") / 2


def test_the_spec_builds_and_runs() -> None:
    sets = ["d_model=64", "vocab_size=50", "decoder.n_layers=4"]
    model = tfkit.build(tfkit.loads(BLOCKS["yaml"], sets=sets, plugins=PLUGINS))
    assert model(torch.randint(50, (2, 7))).shape == (2, 7, 50)


def test_tables_have_all_kinds_and_specs() -> None:
    kinds = {*PLUGINS.registry.kinds("mixer"), "channel_mix"}
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)) == kinds
    rows = dict(re.findall(r"^\| .+? \| `(\w+)` \| (\w+) \|$", TEXT, re.MULTILINE))
    files = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in SPECS.glob("*.yaml")}
    families = {name: spec.get("checkpoint") or files[spec["extends"]]["checkpoint"] for name, spec in files.items()}
    assert rows == families
    assert set(rows.values()) == {path.stem for path in SPECS.glob("families/*.yaml")}


@pytest.mark.parametrize(
    ("command", "output"), re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", BLOCKS["console"], re.MULTILINE)
)
def test_commands_print_what_is_shown(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("hybrid.yaml").write_text(BLOCKS["yaml"], encoding="utf-8")
    program, *arguments = shlex.split(command)
    assert program == "tfkit"
    status = main([*arguments, "--plugin-dir", str(ROOT), "--no-plugins"])
    captured = capsys.readouterr()
    assert status == int(output.startswith("error:"))
    pattern = re.escape(output.rstrip("\n")).replace(r"\.\.\.", "(?:.*)")
    printed = "\n".join(line.rstrip() for line in (captured.out + captured.err).splitlines())
    assert re.fullmatch(f"{pattern}\n*", printed, re.DOTALL), printed

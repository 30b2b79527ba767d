"""The README is true: its commands print what it shows, and its tables have all kinds and specs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import tfkit
from tfkit.cli import main

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(yaml|console)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SPEC = dict(BLOCKS)["yaml"]
SESSIONS = [
    session
    for language, text in BLOCKS
    if language == "console"
    for session in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
    if session[0] != "pip install --editable ."
]


def test_every_block_is_tested() -> None:
    assert len(BLOCKS) == TEXT.count("```") / 2


def test_tables_have_all_kinds_and_specs() -> None:
    plugins = tfkit.load_plugins(plugin_dirs=[ROOT], entry_points=False)
    built_in = tfkit.load_plugins(entry_points=False)
    slots = ("mixer", "attention", "ffn")
    kinds = {kind for slot in slots for kind in plugins.registry.kinds(slot).keys() - built_in.registry.kinds(slot)}
    assert set(re.findall(r"^\| `(\w+)` \| `\w+` \|", TEXT, re.MULTILINE)) == kinds
    counts = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+)M \|", TEXT, re.MULTILINE))
    specs = {path.stem: tfkit.load(path, plugins=plugins) for path in ROOT.glob("src/*/specs/*.yaml")}
    assert counts == {name: f"{graph.spec.model.parameters / 1e6:.1f}" for name, graph in specs.items()}


@pytest.mark.parametrize(("command", "output"), SESSIONS, ids=lambda text: text[:60])
def test_commands_print_what_is_shown(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("hybrid.yaml").write_text(SPEC, encoding="utf-8")
    program, *arguments = shlex.split(command)
    assert program == "tfkit"
    status = main([*arguments, "--plugin-dir", str(ROOT), "--no-plugins"])
    captured = capsys.readouterr()
    assert status == int(output.startswith("error:"))
    pattern = re.escape(output.rstrip("\n")).replace(r"\.\.\.", "(?:.*)")
    printed = "\n".join(line.rstrip() for line in (captured.out + captured.err).splitlines())
    assert re.fullmatch(f"{pattern}\n*", printed, re.DOTALL), printed

"""The tutorial is true: its code is the plugin's own, its spec builds, its commands print what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

import tfkit
from tfkit.cli import main

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:^`(?P<file>[\w./]+)`\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [match.groupdict() for match in BLOCK.finditer(TEXT)]


def of_file(name: str) -> list[str]:
    return [block["text"] for block in BLOCKS if block["file"] == name]


def test_no_block_is_left_unread() -> None:
    assert len(BLOCKS) == TEXT.count("```") / 2
    named = {block["file"] for block in BLOCKS} - {None}
    assert named == {"pyproject.toml", "src/tfkit_additive.py", "tests/test_additive.py", "translator.yaml"}
    assert {block["language"] for block in BLOCKS if block["file"] is None} == {"tree", "console"}


def test_the_folder_is_as_shown() -> None:
    parents: list[str] = []
    for line in next(block["text"] for block in BLOCKS if block["language"] == "tree").splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        parents = [*parents[:depth], line.strip().rstrip("/")]
        path = ROOT.joinpath(*parents[1:])
        assert path.is_dir() if line.endswith("/") else path.is_file()


@pytest.mark.parametrize("name", ["pyproject.toml", "src/tfkit_additive.py"])
def test_the_files_are_as_shown_and_nothing_is_left_out(name: str) -> None:
    assert "\n\n".join(of_file(name)) == (ROOT / name).read_text(encoding="utf-8")


def test_the_tests_are_among_the_tests() -> None:
    (shown,) = of_file("tests/test_additive.py")
    assert shown in (ROOT / "tests" / "test_additive.py").read_text(encoding="utf-8")


def test_the_spec_builds_and_runs() -> None:
    (spec,) = of_file("translator.yaml")
    model = tfkit.build(tfkit.loads(spec, plugins=tfkit.load_plugins(plugin_dirs=[ROOT], entry_points=False)))
    tokens = torch.randint(100, (2, 7))
    assert model(tokens, tokens[:, :3]).shape == (2, 3, 100)


def sessions() -> list[tuple[str, str]]:
    """Commands and what they print."""
    parts = [
        re.split(r"^\$ (.*)\n", block["text"], flags=re.MULTILINE) for block in BLOCKS if block["language"] == "console"
    ]
    return [(command, output) for part in parts for command, output in zip(part[1::2], part[2::2], strict=True)]


@pytest.mark.parametrize(("command", "output"), sessions(), ids=lambda text: text[:60])
def test_commands_print_what_is_shown(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "pip install --editable .":
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("translator.yaml").write_text(of_file("translator.yaml")[0], encoding="utf-8")
    program, *arguments = shlex.split(command)
    assert program == "tfkit"
    status = main([*arguments, "--plugin-dir", str(ROOT), "--no-plugins"])
    found = capsys.readouterr()
    assert status == int(output.startswith("error:"))
    pattern = re.escape(output.rstrip("\n")).replace(r"\.\.\.", "(?:.*)")
    printed = "\n".join(line.rstrip() for line in (found.out + found.err).splitlines())
    assert re.fullmatch(f"{pattern}\n*", printed, re.DOTALL), printed

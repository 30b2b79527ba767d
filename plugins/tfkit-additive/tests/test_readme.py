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
FILES = [
    "pyproject.toml",
    "src/tfkit_additive/__init__.py",
    "src/tfkit_additive/reference.py",
    "tests/test_additive.py",
]
BLOCKS = [match.groupdict() for match in BLOCK.finditer(TEXT)]


def of_file(name: str) -> list[str]:
    return [block["text"] for block in BLOCKS if block["file"] == name]


def written(parts: list[str]) -> str:
    """A file of which the tutorial shows the parts."""
    return "\n\n".join(parts)


def test_no_block_is_left_unread() -> None:
    assert len(BLOCKS) == TEXT.count("```") / 2
    named = {block["file"] for block in BLOCKS} - {None}
    assert named == {*FILES, "translator.yaml"}
    assert {block["language"] for block in BLOCKS if block["file"] is None} == {"tree", "console"}


def test_the_folder_is_as_shown() -> None:
    parents: list[str] = []
    for line in next(block["text"] for block in BLOCKS if block["language"] == "tree").splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        parents = [*parents[:depth], line.strip().rstrip("/")]
        path = ROOT.joinpath(*parents[1:])
        assert path.is_dir() if line.endswith("/") else path.is_file()


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_as_shown_and_nothing_is_left_out(name: str) -> None:
    """So pytest, which runs `tests/test_additive.py`, runs what is printed."""
    assert written(of_file(name)) == (ROOT / name).read_text(encoding="utf-8")


def test_the_spec_builds_and_runs() -> None:
    (spec,) = of_file("translator.yaml")
    model = tfkit.build(tfkit.loads(spec, plugins=tfkit.load_plugins(plugin_dirs=[ROOT], entry_points=False)))
    tokens = torch.randint(100, (2, 7))
    assert model(tokens, tokens[:, :3]).shape == (2, 3, 100)


def session(block: str) -> list[tuple[str, str]]:
    """Commands and what they print."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def test_every_step_runs_as_printed_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an empty folder, with the files that the reader has by then; `--plugin-dir` stands for the installation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    outputs: dict[str, list[str]] = {}
    ran = []
    for block in BLOCKS:
        if block["file"] is not None:
            file = tmp_path / block["file"]
            file.parent.mkdir(exist_ok=True, parents=True)
            outputs.setdefault(block["file"], []).append(block["text"])
            file.write_text(written(outputs[block["file"]]), encoding="utf-8")
            if file.suffix == ".py":
                exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), {"__name__": "tutorial"})
        for command, output in session(block["text"]) if block["language"] == "console" else []:
            ran.append(command)
            if command != "pip install --editable .":
                prints(command, output, capsys)
    assert ran[0] == "pip install --editable ."
    assert len(ran) == 5


def prints(command: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(command)
    assert program == "tfkit"
    status = main([*arguments, "--plugin-dir", str(ROOT), "--no-plugins"])
    captured = capsys.readouterr()
    assert status == int(output.startswith("error:")), command
    pattern = re.escape(output.rstrip("\n")).replace(r"\.\.\.", "(?:.*)")
    printed = "\n".join(line.rstrip() for line in (captured.out + captured.err).splitlines())
    assert re.fullmatch(f"{pattern}\n*", printed, re.DOTALL), printed

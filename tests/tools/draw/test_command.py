"""The command `draw`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tfkit.tools.draw.command import ENDINGS
from tfkit.tools.draw.svg import FORMATS

Run = Callable[..., str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


def test_draw(run: Run, folder: Path) -> None:
    assert run("draw", "gpt2", "-o", "a.svg").startswith("wrote a.svg, ")
    assert "prefers-color-scheme" in (folder / "a.svg").read_text()
    run("draw", "gpt2", "llama3_8b", "-o", "b.html", "--theme", "dark", "--set", "decoder.n_layers=3")
    assert "@media" not in (folder / "b.html").read_text()
    report = json.loads(run("draw", "gpt2", "-o", "c.svg", "--json"))
    assert report["file"] == "c.svg"
    assert report["models"] == ["gpt2"]
    assert (folder / "c.svg").read_text() == (folder / "a.svg").read_text()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ending", ["gpt2", "-o", "a.pdf"]),
        ("no_output", ["gpt2"]),
        ("three", ["gpt2", "gpt2", "gpt2", "-o", "a.svg"]),
        ("folder", ["gpt2", "-o", "."]),
    ],
)
def test_wrong_usage(
    run: Run, golden: Callable[[str, str], None], folder: Path, name: str, arguments: list[str]
) -> None:
    golden(f"cli/draw_{name}", run("draw", *arguments, status=2, stderr=True))
    assert list(folder.iterdir()) == []


def test_the_command_knows_what_can_be_written() -> None:
    assert tuple(FORMATS) == ENDINGS


def test_what_cannot_be_written(run: Run, golden: Callable[[str, str], None]) -> None:
    golden("cli/draw_nowhere", run("draw", "gpt2", "-o", "nowhere/a.svg", status=1, stderr=True))


def test_help(run: Run, golden: Callable[[str, str], None]) -> None:
    golden("cli/draw_help", run("draw", "--help"))

"""The command of docs/commands.md, next to the commands of tfkit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from tfkit.cli import cli, main

from .page import blocks

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


@pytest.fixture(autouse=True)
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write the files of the page, and install their project."""
    for block in blocks(PAGE):
        if block.file is not None:
            file = tmp_path / block.file
            file.parent.mkdir(exist_ok=True, parents=True)
            file.write_text(block.text, encoding="utf-8")
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", str(tmp_path / "lab"))
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("tfkit_depth", None)
    yield
    sys.modules.pop("tfkit_depth", None)


def test_help_has_the_lines_of_the_page(run: Callable[..., str]) -> None:
    (excerpt,) = [block.text for block in blocks(PAGE) if block.language == "text"]
    title, lines = excerpt.split("  ...\n")
    text = run("--help")
    assert text.index(title) < text.index(lines) < text.index("Specs:")


def test_the_command_and_its_specs_are_completed() -> None:
    complete = ShellComplete(cli, {}, "tfkit", "_TFKIT_COMPLETE").get_completions
    assert "depth" in [item.value for item in complete([], "d")]
    assert [item.value for item in complete(["depth", "gpt2"], "vaswani_b")] == ["vaswani_base", "vaswani_big"]
    assert {"--json", "--output", "--set", "--plugin-dir"} <= {item.value for item in complete(["depth"], "--")}


def test_errors_are_those_of_tfkit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["depth", "gpt2", "--set", "decoder.n_layer=3"]) == 1
    assert "--set:1:" in capsys.readouterr().err
    assert main(["depth", "gpt2", "--set", "decoder.n_layer=3", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["errors"][0]["line"] == 1


def test_the_page_is_a_document() -> None:
    assert main(["depth", "vaswani_base", "-o", "depth.html"]) == 0
    text = Path("depth.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "<td>encoder</td><td>6</td>" in text


def test_it_has_about_forty_lines() -> None:
    (code,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    assert len(code.splitlines()) <= 45
    assert isinstance(cli.resolve_command(click.Context(cli), ["depth"])[1], click.Command)

"""Commands of plugins next to the commands of tfkit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import pytest

from tfkit.cli import main
from tfkit.console.commands import Command, CommandGroup

PROJECT = """\
[project]
name = "tfkit-census"
version = "0.1"
[project.entry-points."tfkit.commands"]
census = "census_command:census"
params = "census_command:census"
"""
CODE = '''"""Count the nodes of a spec."""
import click
import tfkit

@tfkit.command("census", examples="tfkit census gpt2")
@click.argument("spec")
def census(reader, spec):
    click.echo(f"{len(reader.load(spec).nodes)} nodes")
'''
pytestmark = pytest.mark.usefixtures("specs")


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    folder = tmp_path / "census"
    (folder / "src").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "src" / "census_command.py").write_text(CODE)
    return folder


@pytest.mark.parametrize("kind", [Command, CommandGroup])
def test_the_help_option_does_not_depend_on_the_first_context(kind: type[click.Command]) -> None:
    tested = kind("census")
    tested.make_parser(click.Context(tested))
    assert "-h, --help" in tested.get_help(click.Context(tested, help_option_names=["--help"]))


def test_it_runs_as_any_other(plugin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["census", "tiny.yaml", "--plugin-dir", str(plugin)]) == 0
    assert capsys.readouterr() == ("3 nodes\n", "")
    assert main(["census", "wrong.yaml", "--plugin-dir", str(plugin)]) == 1
    assert "`two`" in capsys.readouterr().err


def test_help_lists_it_without_running_it(
    plugin: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (plugin / "src" / "census_command.py").write_text('"""Count the nodes of a spec."""\nraise SystemExit(7)\n')
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", str(plugin))
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "  census      Count the nodes of a spec. (tfkit-census 0.1)\n" in out
    assert "  params      hidden by tfkit's own command (tfkit-census 0.1)\n" in out


def test_one_that_fails_is_one_error(
    plugin: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (plugin / "pyproject.toml").write_text(PROJECT.replace("census_command", "broken_command"))
    (plugin / "src" / "broken_command.py").write_text("import there_is_no_such_module\n")
    assert main(["census", "tiny.yaml", "--plugin-dir", str(plugin)]) == 1
    err = capsys.readouterr().err
    assert "tfkit-census" in err
    assert "there_is_no_such_module" in err
    assert "Traceback" not in err
    monkeypatch.setenv("TFKIT_DISABLE", "tfkit-census")
    assert main(["params", "tiny.yaml", "--plugin-dir", str(plugin)]) == 0


def test_a_similar_word_is_named(plugin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cencus", "tiny.yaml", "--plugin-dir", str(plugin)]) == 2
    assert "`census`" in capsys.readouterr().err


def test_help_does_not_fail(monkeypatch: pytest.MonkeyPatch, run: Callable[..., str]) -> None:
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", "/nowhere")
    assert "/nowhere" in run("--help", stderr=True)

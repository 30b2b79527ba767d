"""Commands of plugins: found without running anything, and the hook `tfkit_command`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from tfkit.errors import SpecError
from tfkit.plugin.plugin_commands import PluginCommand, plugin_commands

from .written import write

pytestmark = pytest.mark.usefixtures("clean")
POINTS = '[project.entry-points."tfkit.commands"]\ncount = "tfkit_lab.count"\n'
COMMAND = '''"""Count the layers of a spec.

More about it.
"""
import click
import tfkit

@tfkit.hookimpl
def tfkit_command():
    return click.Command("count")
'''


def project(text: str = COMMAND, points: str = POINTS, folder: str = "lab", name: str = "tfkit-lab") -> None:
    write(f"{folder}/pyproject.toml", f'[project]\nname = "{name}"\nversion = "0.3"\n{points}')
    write(f"{folder}/src/tfkit_lab/__init__.py", "")
    write(f"{folder}/src/tfkit_lab/count.py", text)


def found(*folders: str, **options: object) -> PluginCommand:
    entries = plugin_commands(map(Path, folders or ["lab"]), entry_points=False, **options)  # type: ignore[arg-type]
    assert list(entries) == ["count"]
    return entries["count"]


def refusal(command: PluginCommand) -> str:
    with pytest.raises(SpecError) as caught:
        command.load()
    (diagnostic,) = caught.value.diagnostics
    return " | ".join([diagnostic.message, *diagnostic.notes, diagnostic.help or ""])


def test_it_is_found_without_running_and_loaded_when_it_runs() -> None:
    project()
    command = found()
    assert (command.plugin, command.summary) == ("tfkit-lab 0.3", "Count the layers of a spec.")
    assert "tfkit_lab" not in sys.modules
    assert isinstance(command.load(), click.Command)


def test_of_a_distribution(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("tfkit-lab", "0.3", COMMAND, "[tfkit.commands]\ncount = tfkit_lab\n")
    command = plugin_commands()["count"]
    assert (command.plugin, command.summary) == ("tfkit-lab 0.3", "Count the layers of a spec.")
    assert command.load().name == "count"
    assert plugin_commands(entry_points=False) == {}
    monkeypatch.setenv("TFKIT_DISABLE", "tfkit-lab")
    assert plugin_commands() == {}


def test_discovery_imports_nothing_heavy() -> None:
    project()
    code = "import sys; from pathlib import Path; from tfkit.plugin.plugin_commands import plugin_commands\n"
    code += "print(list(plugin_commands([Path('lab')])), {'torch', 'pydantic', 'pluggy', 'click'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "['count'] set()\n"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import nowhere", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere' | HERE:1"),
        ("def broken(:", "cannot be loaded: SyntaxError: invalid syntax (count.py, line 1) | HERE:1"),
        ("x = 1", "it defines no hook; write `@tfkit.hookimpl def tfkit_command()` | to switch"),
        (
            COMMAND.replace("tfkit_command", "tfkit_comand"),
            "unknown hook `tfkit_comand` in plugin tfkit-lab 0.3 | HERE",
        ),
        (
            COMMAND.replace('return click.Command("count")', "{}['x']"),
            "cannot be loaded: `tfkit_command` failed: KeyError: 'x' | HERE:10",
        ),
        (
            COMMAND.replace('click.Command("count")', "3"),
            "`tfkit_command` must return a click.Command; got int | HERE:8",
        ),
        (
            COMMAND.replace('click.Command("count")', "None"),
            "has no hook `tfkit_command`, or it returned None",
        ),
    ],
)
def test_one_that_fails_harms_only_itself(text: str, cause: str) -> None:
    project(text)
    message = refusal(found())
    assert "tfkit-lab 0.3" in message
    assert cause.replace("HERE", str(Path("lab/src/tfkit_lab/count.py").resolve())) in message


def test_a_module_that_is_not_there_has_no_summary() -> None:
    project(points=POINTS.replace("tfkit_lab.count", "tfkit_lab.cuont"))
    assert found().summary == ""
    assert "ModuleNotFoundError: No module named 'tfkit_lab.cuont'" in refusal(found())


def test_two_of_one_name_name_both(monkeypatch: pytest.MonkeyPatch) -> None:
    project()
    project(folder="other", name="tfkit-other")
    command = found("lab", "other")
    assert refusal(command).startswith("there are two commands named `count` | tfkit-lab 0.3 | tfkit-other 0.3 | ")
    monkeypatch.setenv("TFKIT_DISABLE", "tfkit-other")
    assert found("lab", "other").load().name == "count"


def test_one_of_tfkit_is_not_replaced() -> None:
    project()
    command = found(built_in=["count"])
    assert command.plugin == "tfkit, tfkit-lab 0.3"
    assert refusal(command).startswith("there are two commands named `count` | tfkit | tfkit-lab 0.3 | ")

"""Commands: found without running anything, their sections, and their import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from tfkit.cli import cli
from tfkit.errors import SpecError
from tfkit.plugin import discover
from tfkit.plugin.commands import (
    CommandEntry,
    Declaration,
    built_in_commands,
    in_sections,
    plugin_commands,
    read_declaration,
)

from .written import write

pytestmark = pytest.mark.usefixtures("clean")
POINTS = '[project.entry-points."tfkit.commands"]\ncount = "tfkit_lab.count:count"\n'
COMMAND = '''"""Count the layers of a spec.

More about it.
"""
import click

@click.command
def count():
    pass
'''


def project(text: str = COMMAND, points: str = POINTS, folder: str = "lab", name: str = "tfkit-lab") -> None:
    write(f"{folder}/pyproject.toml", f'[project]\nname = "{name}"\nversion = "0.3"\n{points}')
    write(f"{folder}/src/tfkit_lab/__init__.py", "")
    write(f"{folder}/src/tfkit_lab/count.py", text)


def entry(*folders: str) -> CommandEntry:
    entries = plugin_commands(map(Path, folders or ["lab"]), entry_points=False)
    assert list(entries) == ["count"]
    return entries["count"]


def refusal(command: CommandEntry) -> str:
    with pytest.raises(SpecError) as caught:
        command.load()
    (diagnostic,) = caught.value.diagnostics
    return " | ".join([diagnostic.message, *diagnostic.notes, diagnostic.help or ""])


def test_it_is_found_without_running_and_loaded_when_it_runs() -> None:
    project()
    command = entry()
    assert (command.plugin, command.declaration.summary) == ("tfkit-lab 0.3", "Count the layers of a spec.")
    assert "tfkit_lab" not in sys.modules
    assert isinstance(command.load(), click.Command)


def test_of_a_distribution(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("tfkit-lab", "0.3", COMMAND, "[tfkit.commands]\ncount = tfkit_lab:count\n")
    command = plugin_commands()["count"]
    assert (command.plugin, command.declaration.summary) == ("tfkit-lab 0.3", "Count the layers of a spec.")
    assert command.load().name == "count"
    assert plugin_commands(entry_points=False) == {}
    monkeypatch.setenv("TFKIT_DISABLE", "tfkit-lab")
    assert plugin_commands() == {}


def test_discovery_imports_nothing_heavy() -> None:
    project()
    code = "import sys; from pathlib import Path; from tfkit.plugin.commands import plugin_commands\n"
    code += "print(list(plugin_commands([Path('lab')])), {'torch', 'pydantic', 'pluggy', 'click'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "['count'] set()\n"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import nowhere", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere' | HERE:1"),
        ("def broken(:", "cannot be loaded: SyntaxError: invalid syntax (count.py, line 1) | HERE:1"),
        (
            COMMAND.replace("@click.command\n", "{}['x']\n"),
            "cannot be loaded: KeyError: 'x' | HERE:7",
        ),
        ("x = 1", "cannot be loaded: AttributeError: module 'tfkit_lab.count' has no attribute 'count' | to switch"),
        ("count = 3", "cannot be loaded: `tfkit_lab.count:count` must be a click.Command; got int | to switch"),
        (COMMAND.replace("@click.command\n", ""), "must be a click.Command; got function | to switch"),
    ],
)
def test_one_that_fails_harms_only_itself(text: str, cause: str) -> None:
    project(text)
    message = refusal(entry())
    assert "tfkit-lab 0.3" in message
    assert cause.replace("HERE", str(Path("lab/src/tfkit_lab/count.py").resolve())) in message


def test_a_module_that_is_not_there_has_no_summary() -> None:
    project(points=POINTS.replace("tfkit_lab.count", "tfkit_lab.cuont"))
    assert entry().declaration.summary == ""
    assert "ModuleNotFoundError: No module named 'tfkit_lab.cuont'" in refusal(entry())


def test_two_of_one_name_name_both(monkeypatch: pytest.MonkeyPatch) -> None:
    project()
    project(folder="other", name="tfkit-other")
    command = entry("lab", "other")
    assert refusal(command).startswith("there are two commands named `count` | tfkit-lab 0.3 | tfkit-other 0.3 | ")
    monkeypatch.setenv("TFKIT_DISABLE", "tfkit-other")
    assert entry("lab", "other").load().name == "count"


def test_one_of_tfkit_is_not_replaced() -> None:
    project(points=POINTS.replace("count =", "params ="))
    arguments = ["params", "--plugin-dir", "lab"]
    assert cli.resolve_command(click.Context(cli), arguments)[1] is built_in_commands()["params"].load()


# ---- sections ----


def declaration(*options: str, decorator: str = "@tfkit.command", before: str = "") -> Declaration:
    source = f'"""Count the layers."""\nimport tfkit\n{before}\n'
    source += (
        f'{decorator}("count", examples="", {", ".join(options)})\n@click.argument("spec")\ndef count(reader):\n    x\n'
    )
    return read_declaration(source, "count")


def test_a_command_names_its_section_and_its_order() -> None:
    section, order = 'section="Größen"', "order=35"
    assert declaration(section, order) == Declaration("Count the layers.", "Größen", 35)
    assert declaration(section, order, decorator="@command") == Declaration("Count the layers.", "Größen", 35)
    assert declaration(order) == Declaration("Count the layers.", "Plugins", 35)
    assert declaration(section) == Declaration("Count the layers.", "Größen", 1000)
    assert declaration(section, order, decorator="@click.pass_obj") == Declaration("Count the layers.")
    assert declaration("section=TITLE", "order=None") == Declaration("Count the layers.")
    assert declaration(section, 'notes="""\n@here\ndef count(\n"""') == Declaration("Count the layers.", "Größen")


def test_another_function_gives_no_section() -> None:
    other = '@tfkit.command("sum", section="Sums", order=7)\ndef total(reader): ...\n'
    assert declaration(before=other) == Declaration("Count the layers.")
    assert declaration("order=9", before=f"class A:\n    x = 3\n{other}") == Declaration(
        "Count the layers.", "Plugins", 9
    )


def test_a_docstring_may_have_the_line_of_the_function() -> None:
    source = (
        '"""Count.\n\nUse it like\ndef count(x)\n"""\n@tfkit.command("count", section="Sizes")\ndef count(r): ...\n'
    )
    assert read_declaration(source, "count") == Declaration("Count.", "Sizes")


def test_sections_are_sorted_by_their_first_command() -> None:
    text = '"""Count."""\nimport tfkit\n\n@tfkit.command("c", examples="", section="{}", order={})\n'
    order = {"a": ("Last", 7), "b": ("First", 30), "c": ("First", 3), "d": ("Last", 7), "e": ("First", 8)}
    points = "".join(f'{name} = "tfkit_lab.{name}:count"\n' for name in order)
    project(points=f'[project.entry-points."tfkit.commands"]\n{points}')
    for name, location in order.items():
        write(f"lab/src/tfkit_lab/{name}.py", f"{text.format(*location)}def count(reader): ...\n")
    sections = in_sections(plugin_commands([Path("lab")], entry_points=False).values())
    names = {title: [command.name for command in commands] for title, commands in sections.items()}
    assert list(names.items()) == [("First", ["c", "e", "b"]), ("Last", ["a", "d"])]


# ---- the commands of tfkit ----


def test_every_command_of_tfkit_declares_its_location() -> None:
    declarations = {name: command.declaration for name, command in built_in_commands().items()}
    assert [name for name, declaration in declarations.items() if not declaration.summary.endswith(".")] == []
    assert len({declaration.order for declaration in declarations.values()}) == len(declarations)
    assert "Plugins" not in {declaration.section for declaration in declarations.values()}


def test_a_source_tree_has_the_commands_of_its_project(install: Callable[..., None]) -> None:
    install("tfkit", "0.0", COMMAND, "[tfkit.commands]\nolder = tfkit_lab:count\n")
    assert "older" not in built_in_commands()
    assert {"build", "import"} < set(built_in_commands())


def test_a_wheel_has_the_commands_of_its_metadata(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("tfkit", "0.0", COMMAND, "[tfkit.commands]\ncount = tfkit_lab:count\n")
    write("site/pyproject.toml", '[project]\nname = "careless"\n')
    monkeypatch.setattr(discover, "__file__", str(Path("site/tfkit/plugin/discover.py").resolve()))
    assert list(built_in_commands()) == ["count"]
    assert plugin_commands() == {}


def test_without_metadata_there_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "__file__", str(Path("copied/tfkit/plugin/discover.py").resolve()))
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(SpecError, match="tfkit is not installed, and not in its source tree"):
        built_in_commands()


def test_the_source_tree_of_tfkit_is_no_plugin() -> None:
    write("tree/pyproject.toml", f'[project]\nname = "tfkit"\n{POINTS}')
    with pytest.raises(SpecError, match="`tree` contains no plugin"):
        plugin_commands([Path("tree")], entry_points=False)

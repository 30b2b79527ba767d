"""The public names: listed once, documented, and the only names that the plugins use."""

from __future__ import annotations

import ast
import ctypes
import gc
import importlib
import inspect
import itertools
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

import tfkit
import tfkit.commands
import tfkit.nn

ROOT = Path(__file__).parents[1]
STUB = Path(tfkit.__file__).with_suffix(".pyi")
COMMANDS = STUB.with_name("commands.pyi")
PLUGIN_FILES = sorted(ROOT.glob("plugins/*/**/*.py"))


def listed(stub: Path = STUB) -> list[ast.alias]:
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    return [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def documented(name: str, value: object) -> bool:
    """Has a docstring, or for an alias or an option a string below its assignment."""
    if (inspect.isclass(value) or inspect.isfunction(value)) and value.__doc__:
        return True
    for text in code():
        if f"\n{name} = " not in text and f"\n{name}: " not in text:  # parsing all files takes seconds
            continue
        for node, below in itertools.pairwise(ast.parse(text).body):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return isinstance(below, ast.Expr) and is_text(below.value)
    return False


@cache
def code() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in (ROOT / "tfkit").glob("**/*.py")]


def kind_of(name: str) -> int:
    """Sort constants, then classes, then functions, as ruff does."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2


@pytest.mark.parametrize(("module", "stub"), [(tfkit, STUB), (tfkit.commands, COMMANDS)], ids=["tfkit", "commands"])
def test_each_is_listed_once_in_order_and_can_be_imported(module: ModuleType, stub: Path) -> None:
    names = [alias.name for alias in listed(stub)]
    assert [alias.asname for alias in listed(stub)] == names
    assert sorted(set(names)) == sorted(names) == module.__all__ == dir(module)
    lines = [line.split(" import ") for line in stub.read_text("utf-8").splitlines() if line.startswith("from ")]
    assert lines == sorted(lines, key=lambda line: (line[0], kind_of(line[1].split()[0]), line[1].casefold()))
    for name in names:
        getattr(module, name)


@pytest.mark.parametrize("module", ["tfkit", "tfkit.commands", "tfkit.nn"])
def test_each_is_documented(module: str) -> None:
    home = importlib.import_module(module)
    values = {name: getattr(home, name) for name in dir(home) if not name.startswith("_")}
    bare = [name for name, value in values.items() if not inspect.ismodule(value) and not documented(name, value)]
    assert bare == []


@pytest.mark.parametrize(("module", "page"), [(tfkit, "names.md"), (tfkit.commands, "commands.md")])
def test_the_page_has_each_once(module: ModuleType, page: str) -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == module.__all__


def test_commands_use_no_torch_before_they_run() -> None:
    code = "import sys; from tfkit.commands import command, json_option, page, table, tag, write_file"
    code += "; print({'torch', 'pydantic', 'rich', 'yaml'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_an_archive_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "tfkit.zip", "w") as packed:
        packed.write(tfkit.__file__, "tfkit/__init__.py")
    code = f"import sys; sys.path[:0] = [{str(tmp_path / 'tfkit.zip')!r}]; import tfkit"
    actual = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: tfkit needs its files in a folder, not in an archive" in actual.stderr


def test_importing_tfkit_imports_little() -> None:
    code = "import sys; before = set(sys.modules); import tfkit; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "pydantic", "typing", "re", "ast"} & set(loaded)
    assert [name for name in loaded if name.startswith("tfkit")] == ["tfkit"]


@pytest.mark.parametrize("name", ["nn", "reference", "testing"])
def test_a_module_that_nobody_has_imported_is_an_attribute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"tfkit.{name}")
    monkeypatch.delattr(tfkit, name)
    assert getattr(tfkit, name) is module


def test_a_method_of_all_objects_hides_no_function() -> None:
    """nnsight adds the method `save` to `object`."""
    methods = gc.get_referents(object.__dict__)[0]
    methods["save"] = lambda value: value
    try:
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(object))
        assert (0).save() == 0  # type: ignore[attr-defined]
        assert tfkit.save is importlib.import_module("tfkit.tools.save.save").save
    finally:
        del methods["save"]
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(object))
    assert not hasattr(0, "save")


def test_no_other_name_is_there() -> None:
    with pytest.raises(AttributeError, match=r"'tfkit.commands' has no attribute 'tabel': .* is 'table'"):
        tfkit.commands.tabel  # noqa: B018
    with pytest.raises(AttributeError, match="'tfkit' has no attribute 'buidl': one with a similar name is 'build'"):
        tfkit.buidl  # noqa: B018
    with pytest.raises(AttributeError, match=r"'tfkit' has no attribute '_homes_'$"):
        tfkit._homes_  # noqa: B018


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=lambda path: str(path.relative_to(ROOT / "plugins")))
def test_a_plugin_imports_public_modules_only(path: Path) -> None:
    """A contract of import-linter would not do: it reads packages, and a plugin may be a single file."""
    public = {"tfkit", "tfkit.commands", "tfkit.nn"} | (
        {"tfkit.testing", "tfkit.reference", "tfkit.cli"} if "tests" in path.parts else set()
    )
    if path.name == "reference.py":
        public.add("tfkit.reference")
    actual = [
        name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [value.name for value in node.names])
        if name is not None and name.split(".")[0] == "tfkit" and name not in public
    ]
    assert actual == []


def test_tools_of_training_and_eject_take_the_names_of_commands() -> None:
    """What a command of a plugin may import from `tfkit.commands`, they do not import from elsewhere."""
    homes = dict.fromkeys(re.findall(r"^from (\S+) import (\w+) as", COMMANDS.read_text("utf-8"), re.MULTILINE))
    parts = ("train", "sweep", "runs", "eval_", "solve", "eject")
    tools = ROOT / "tfkit" / "tools"
    files = [*(file for part in parts for file in (tools / part).rglob("*.py")), tools / "tokens.py"]
    elsewhere = [
        f"{file.name}: {node.module}.{alias.name}"
        for file in [*files, tools / "tokenizer.py"]
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module, alias.name) in homes
    ]
    assert elsewhere == []

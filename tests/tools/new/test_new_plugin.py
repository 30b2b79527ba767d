"""A new plugin passes its tests under any valid name; invalid names and folders are rejected."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfkit.cli import main
from tfkit.tools.new import command as new_command
from tfkit.tools.new.command import SLOTS, PluginNames, installed_from

from ...sampling import some

ROOT = Path(__file__).parents[3]
NAMES = ["a", "token_shift", "x" * 24]
Run = Callable[..., str]
pytestmark = pytest.mark.usefixtures("specs")


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def lint(folder: Path) -> None:
    for arguments in (["check"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *arguments, "--quiet", "--no-cache", str(folder)], check=True)


@pytest.fixture
def project(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new plugin, which all commands load."""
    assert run("new", "plugin", "token-shift") == "wrote tfkit-token-shift: 10 files; next: make test, in it\n"
    path = Path("tfkit-token-shift").resolve()
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", str(path))
    monkeypatch.syspath_prepend(path / "src")
    yield path
    sys.modules.pop("tfkit_token_shift", None)


def test_its_component_and_its_spec_are_right(project: Path) -> None:
    """As its own tests say, but for the promises and the README, which take their time: all of them run below."""
    tests = runpy.run_path(str(project / "tests/test_token_shift.py"))
    for name in ("test_formula", "test_one_piece_is_rejected", "test_generate"):
        tests[name]()


@pytest.mark.slow
def test_its_own_tests_are_green(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{project / 'src'}")
    subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=project, check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("slot", sorted({*SLOTS} - {"ffn"}))
def test_a_new_plugin_of_another_slot_is_green(slot: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("new", "plugin", "smooth", "--slot", slot)
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", str(Path("tfkit-smooth").resolve()))
    monkeypatch.setenv("PYTHONPATH", str(Path("tfkit-smooth/src").resolve()))
    subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd="tfkit-smooth", check=True, timeout=300)


@pytest.mark.parametrize(("name", "slot"), some(product(NAMES, SLOTS), 4))
def test_its_code_is_clean(name: str, slot: str, run: Run) -> None:
    run("new", "plugin", name, "-o", "made", "--slot", slot)
    lint(Path("made"))
    assert not [text for text in files(Path("made")).values() if re.search(r"emplate|@[A-Z]+@", text)]


def test_its_files(run: Run) -> None:
    run("new", "plugin", "token_shift")
    assert sorted(files(Path("tfkit-token-shift"))) == [
        ".github/workflows/test.yml",
        ".gitignore",
        "Makefile",
        "README.md",
        "pyproject.toml",
        "src/tfkit_token_shift/__init__.py",
        "src/tfkit_token_shift/py.typed",
        "src/tfkit_token_shift/specs/token_shift_tiny.yaml",
        "tests/test_readme.py",
        "tests/test_token_shift.py",
    ]


def test_the_names() -> None:
    names = PluginNames("token_shift")
    assert (names.distribution, names.camel) == ("tfkit-token-shift", "TokenShift")
    assert names.rendered("tfkit-template tfkit_template TemplateFFN template_tiny") == (
        "tfkit-token-shift tfkit_token_shift TokenShiftFFN token_shift_tiny"
    )


@pytest.mark.parametrize("name", ["Shift", "a b", "2d", "a--b", "_a", "a_", "", "x" * 25, "../a", "ä"])
def test_no_name(name: str, run: Run) -> None:
    assert "is not a name for a plugin" in run("new", "plugin", name, status=1, stderr=True)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("class", "a word of Python's or YAML's"),
        ("null", "a word of Python's or YAML's"),
        ("json", "a module of Python's library"),
        ("gelu", "it is an ffn kind, built in"),
    ],
)
def test_a_name_that_is_taken(name: str, why: str, run: Run) -> None:
    assert why in run("new", "plugin", name, status=1, stderr=True)
    assert not Path(f"tfkit-{name}").exists()


@pytest.mark.parametrize("disabled", ["", "tfkit-shift"])
@pytest.mark.parametrize("broken", [False, True])
def test_a_plugin_of_that_name(disabled: str, broken: bool, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded, broken or switched off."""
    run("new", "plugin", "shift")
    if broken:
        Path("tfkit-shift/src/tfkit_shift/__init__.py").write_text("raise RuntimeError")
    monkeypatch.setenv("TFKIT_DISABLE", disabled)
    again = run("new", "plugin", "shift", "-o", "b", "--plugin-dir", "tfkit-shift", status=1, stderr=True)
    assert "there is a plugin tfkit-shift" in again


def test_a_spec_of_that_name(run: Run) -> None:
    Path("lab/src/tfkit_lab/specs").mkdir(parents=True)
    Path("lab/pyproject.toml").write_text(
        '[project]\nname = "tfkit-lab"\n[project.entry-points."tfkit.specs"]\na = "tfkit_lab.specs"\n'
    )
    Path("lab/src/tfkit_lab/specs/shift_tiny.yaml").write_text("extends: gpt2\nname: shift_tiny\n")
    text = run("new", "plugin", "shift", "--plugin-dir", "lab", status=1, stderr=True)
    assert "there is a spec shift_tiny, tfkit-lab" in text


@pytest.mark.parametrize(("folder", "why"), [("full", "is not empty"), (".", "is not empty"), ("file", "is a file")])
def test_a_folder_that_is_not_empty(folder: str, why: str, run: Run) -> None:
    Path("full").mkdir()
    Path("full/mine").write_text("")
    Path("file").write_text("")
    before = files(Path())
    assert why in run("new", "plugin", "shift", "-o", folder, status=1, stderr=True)
    assert files(Path()) == before


def test_an_empty_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another one, and not the one that the shell is in: that would be removed below it."""
    Path("empty").mkdir()
    run("new", "plugin", "shift", "-o", "empty")
    assert Path("empty/Makefile").exists()
    Path("here").mkdir()
    monkeypatch.chdir("here")
    assert "current folder" in run("new", "plugin", "shift", "-o", ".", status=1, stderr=True)


def test_all_or_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text = Path.write_text

    def full(self: Path, text: str, **options: str) -> int:
        if self.name == "pyproject.toml":
            raise OSError(28, "No space left on device")
        return write_text(self, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    assert "No space left" in run("new", "plugin", "shift", status=1, stderr=True)
    assert not Path("tfkit-shift").exists()


# ---- the source of tfkit in its Makefile ----


@pytest.mark.parametrize(
    ("recorded", "source"),
    [
        ({"url": "file:///home/a%20b/tfkit", "dir_info": {"editable": True}}, "/home/a b/tfkit"),
        (
            {"url": "https://a.org/t.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}},
            "git+https://a.org/t.git@12ab",
        ),
        ({"url": "https://a.org/tfkit.whl", "archive_info": {}}, "https://a.org/tfkit.whl"),
        (None, "tfkit>=0.1.0"),
    ],
)
def test_where_tfkit_is_from(recorded: dict[str, object] | None, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = None if recorded is None else json.dumps(recorded)
    monkeypatch.setattr(
        new_command, "distribution", lambda name: SimpleNamespace(version="0.1.0", read_text=lambda _: text)
    )
    assert installed_from() == source


def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(new_command, "distribution", missing)
    assert installed_from() == str(ROOT)


def commands(*arguments: str, **environment: str) -> str:
    """The commands that make would run."""
    make = ["make", "--dry-run", "--no-print-directory", "-C", "tfkit-shift", *arguments]
    done = subprocess.run(make, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    return done.stdout


def test_the_makefile_installs_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_command, "installed_from", lambda: "https://a.org/$x/tfkit#1")
    run("new", "plugin", "shift")
    assert '"https://a.org/$x/tfkit#1" --editable ".[test]"' in commands(TFKIT="")
    Path("checkout").mkdir()
    Path("checkout/pyproject.toml").write_text("")
    Path("checkout/constraints.txt").write_text("")
    pinned = '--constraint ../checkout/constraints.txt --editable "../checkout" --editable ".[test]"'
    assert pinned in commands("TFKIT=../checkout")
    assert pinned in commands(TFKIT="../checkout")


def test_what_is_new_is_a_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "model", "shift"]) == 2
    assert "`model` is not one of `plugin`, `run`" in capsys.readouterr().err

"""The ledger of tests: a test runs again if anything has changed that it depends on, in whatever way."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    "pyproject.toml": """
        [project]
        [project.entry-points]
        [tool.pytest.ini_options]
        addopts = "--import-mode=importlib"
        """,
    ".gitignore": "/out/\n__pycache__/\n",
    "tfkit/__init__.py": "",
    "tfkit/__init__.pyi": "",
    "tfkit/pytest_plugin.py": "",
    "tfkit/lazy.py": "VALUE = 7",
    "tfkit/by_name.py": "VALUE = 8",
    "tfkit/by_process.py": "VALUE = 9",
    "tfkit/unused.py": "VALUE = 10",
    "tfkit/values.py": """
        import importlib
        from functools import cache
        from pathlib import Path

        DATA = Path(__file__).parents[1] / "data"

        @cache
        def inner():
            return (DATA / "inner.txt").read_text()

        @cache
        def outer():
            return inner() + "."

        def lazy():
            from tfkit import lazy
            return lazy.VALUE

        def by_name(name):
            return importlib.import_module(f"tfkit.{name}").VALUE
        """,
    "tests/helper.py": "from tfkit.values import DATA\nTEXT = (DATA / 'helper.txt').read_text()",
    "tests/conftest.py": """
        import pytest
        from tfkit.values import DATA, inner

        @pytest.fixture(scope="session")
        def text():
            return (DATA / "fixture.txt").read_text()

        @pytest.fixture(scope="session")
        def cached_text():
            return inner()
        """,
    "tests/test_first.py": """
        from tests.helper import TEXT
        from tfkit import values

        def test_inner():
            values.inner()

        def test_outer():
            values.outer()

        def test_fixture(text):
            pass

        def test_file():
            (values.DATA / "file.txt").read_text()

        def test_folder():
            [*values.DATA.iterdir()]

        def test_name():
            values.by_name("by_name")
        """,
    "tests/test_second.py": """
        import subprocess, sys
        from tests.helper import TEXT
        from tfkit import values

        def test_outer_again():
            values.outer()

        def test_fixture_again(text):
            pass

        def test_cached_fixture(cached_text):
            pass

        def test_name_again():
            values.by_name("by_name")

        def test_process(tmp_path):
            subprocess.run([sys.executable, "-c", "pass"], cwd=tmp_path, check=True)

        def test_process_inside():
            subprocess.run([sys.executable, "-c", "pass"], cwd=values.DATA, check=True)
        """,
    "tests/test_third.py": "def test_alone():\n    pass\n",
    **{f"data/{name}.txt": name for name in ("inner", "fixture", "file", "helper", "unused")},
}
FIRST = {"inner", "outer", "fixture", "file", "folder", "name"}
SECOND = {"outer_again", "fixture_again", "cached_fixture", "name_again", "process", "process_inside"}
PROCESSES = {"process", "process_inside"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small repository with the ledger, all of whose tests are green."""
    folder = tmp_path_factory.mktemp("repository")
    for name, text in FILES.items():
        write(folder, name, text)
    (folder / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "ledger.py", folder / "tools")
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "--all"], cwd=folder, check=True)
    assert "13 passed" in run_pytest(folder, "--unproved")
    assert "13 of 13 green on" in run_pytest(folder, "--unproved")
    assert unproved(folder) == set()
    return folder


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(re.sub(r"^ {8}", "", text, flags=re.MULTILINE))


def run_pytest(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:tfkit", "-p", "no:cacheprovider", "-p", "no:randomly"]
    arguments = ("-p", "tools.ledger", *arguments)
    result = subprocess.run([*command, *arguments], cwd=folder, check=False, capture_output=True, text=True)
    return result.stdout + result.stderr


def unproved(folder: Path) -> set[str]:
    """Return the tests that would run."""
    return {*re.findall(r"::test_(\w+)", run_pytest(folder, "--unproved", "--collect-only", "-q"))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("data/file.txt", {"file"}),
        ("data/inner.txt", {"inner", "outer", "outer_again", "cached_fixture"}),
        ("data/fixture.txt", {"fixture", "fixture_again"}),
        ("data/helper.txt", FIRST | SECOND),  # read when the first file of tests was imported
        ("data/unused.txt", set()),
        ("data/new.txt", {"folder"}),
        ("tfkit/lazy.py", FIRST | SECOND | {"alone"}),  # a function of `values` imports it
        ("tfkit/by_name.py", {"name", "name_again", "process"}),
        ("tfkit/by_process.py", {"process"}),
        ("tests/helper.py", FIRST | SECOND),
        ("tests/conftest.py", FIRST | SECOND | {"alone"}),
        ("tests/test_third.py", {"alone"}),
        ("tests/test_first.py", FIRST),
    ],
)
def test_a_change_makes_tests_run_again(repository: Path, file: str, tests: set[str]) -> None:
    """A process inside of the repository may read all files."""
    path = repository / file
    before = path.read_bytes() if path.exists() else None
    try:
        path.write_bytes((before or b"") + b"\n# changed\n")
        assert unproved(repository) == tests | {"process_inside"}
    finally:
        path.unlink() if before is None else path.write_bytes(before)


@pytest.mark.slow
def test_red_tests_and_files_that_change_during_the_run_are_not_proved(repository: Path) -> None:
    text = "def test_alone():\n    {}\n"
    try:
        write(repository, "tests/test_third.py", text.format("assert False"))
        assert "12 of 13 green on" in run_pytest(repository, "--unproved")
        assert unproved(repository) == {"alone"}
        write(
            repository,
            "tests/test_third.py",
            text.format("path = __import__('pathlib').Path(__file__)\n    path.write_text(path.read_text())"),
        )
        assert "1 passed" in run_pytest(repository, "--unproved", "tests/test_third.py")
        assert "alone" in unproved(repository)
    finally:
        write(repository, "tests/test_third.py", FILES["tests/test_third.py"])
    assert unproved(repository) == set()

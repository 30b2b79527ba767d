"""The list of planted bugs fits the code: `tools/planted.py` can plant every bug."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def test_each_bug_is_there_once_and_can_be_planted() -> None:
    content = (ROOT / "tests" / "planted.yaml").read_text(encoding="utf-8")
    bugs = yaml.safe_load(content)
    # A merge can repeat a key, of which YAML keeps the last value.
    assert re.findall(r"^(?:- |  )(\w+): ", content, re.MULTILINE) == ["bug", "file", "old", "new", "tests"] * len(bugs)
    assert len({bug["bug"] for bug in bugs}) == len(bugs)
    for bug in bugs:
        text = (ROOT / bug["file"]).read_text(encoding="utf-8")
        assert text.count(bug["old"]) == 1, f"{bug['bug']}: the code has changed: say what is broken now"
        assert bug["old"] != bug["new"], bug["bug"]
        for test in bug["tests"]:
            assert (ROOT / test.partition("::")[0]).exists(), test


def test_each_listed_mutant_is_a_change_of_its_file() -> None:
    sections = yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text(encoding="utf-8"))
    for mutant in [*sections["equivalent"], *sections["without_test"]]:
        lines = [line.strip() for line in (ROOT / mutant["file"]).read_text(encoding="utf-8").split("\n")]
        assert mutant["before"] in lines, f"{mutant['before']}: the code has changed: remove the mutant"
        assert mutant["before"] != mutant["after"]
        assert mutant["reason"]


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    """By pytest's default, it looks for no tests in folders called `build`."""
    patterns = pytestconfig.getini("norecursedirs")
    folders = {folder for file in Path(__file__).parent.rglob("test_*.py") for folder in file.parents}
    assert not [folder for folder in folders for pattern in patterns if fnmatch(folder.name, pattern)]

"""Skipped tests: each is on the list, with its reason, and the list has no test that is gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import skips

ROOT = Path(__file__).parents[1]


def test_listed_functions_exist() -> None:
    for function, reason in skips.read_list():
        file, _, name = function.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), function
        assert reason


def test_a_skip_that_is_not_listed_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skips, "LIST", tmp_path / "skips.txt")
    skips.LIST.write_text("tests/test_a.py::test_one  needs a CUDA device\n")

    def status_of(name: str, reason: str, *, renew: bool = False, outcome: str = "skipped") -> tuple[int, list[str]]:
        plugin, lines = skips.Skips(renew=renew), list[str]()
        session = type("Session", (), {"exitstatus": pytest.ExitCode.OK})()
        where = ("tests/test_a.py", 7, f"Skipped: {reason}")
        report = pytest.TestReport(f"tests/test_a.py::{name}[é]", ("", 7, ""), {}, outcome, where, "call")  # type: ignore[arg-type]
        plugin.pytest_runtest_logreport(report)
        plugin.pytest_sessionfinish(session)
        writer = type("Reporter", (), {"write_line": lambda self, line, **_: lines.append(line)})()
        plugin.pytest_terminal_summary(writer)
        return int(session.exitstatus), lines

    assert status_of("test_one", "needs a CUDA device") == (0, [])
    assert status_of("test_two", "needs a CUDA device", outcome="failed") == (0, [])
    text = "SKIPPED without an entry in tests/skips.txt: tests/test_a.py::"
    assert status_of("test_one", "peft is not installed") == (1, [f"{text}test_one  peft is not installed"])
    assert status_of("test_two", "needs a CUDA device") == (1, [f"{text}test_two  needs a CUDA device"])
    assert status_of("test_two", "needs a CUDA device", renew=True) == (0, [])
    assert len(skips.read_list()) == 2
    assert status_of("test_two", "needs a CUDA device") == (0, [])


def test_a_skipped_file_counts() -> None:
    plugin = skips.Skips(renew=False)
    where = ("tests/test_a.py", 7, "Skipped: could not import 'furo'")
    plugin.pytest_collectreport(pytest.CollectReport("tests/test_a.py", "skipped", where, None))  # type: ignore[arg-type]
    assert plugin.skips == {("tests/test_a.py", "could not import 'furo'")}

"""A second process that answers requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfkit.tools.common.isolated import Isolated

PROGRAM = """\
import json, os, sys

sys.stdin.readline()
for line in sys.stdin:
    print(json.dumps(os.environ.get(json.loads(line))), flush=True)
"""


def test_the_variables_of_the_caller_replace_those_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.setenv("TFKIT_CHANGED", "outer")
    monkeypatch.setenv("TFKIT_UNCHANGED", "old")
    with Isolated(str(tmp_path / "program.py"), {"TFKIT_CHANGED": "inner", "TFKIT_NEW": "new"}) as process:
        names = ("TFKIT_CHANGED", "TFKIT_UNCHANGED", "TFKIT_NEW", "TFKIT_NONE")
        assert [process.answer(name) for name in names] == ["inner", "old", "new", None]

"""Progress messages, and the rows of tables."""

from __future__ import annotations

import io
import time

import pytest

from tfkit.cli import main
from tfkit.console.output import merge_rows
from tfkit.tools.build import first_run

pytestmark = pytest.mark.usefixtures("specs")


def test_progress_is_for_terminals_and_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def slow(*args: object, **options: object) -> object:
        time.sleep(0.3)
        return build(*args, **options)  # type: ignore[arg-type]

    build = first_run.build
    monkeypatch.setattr(first_run, "build", slow)
    monkeypatch.setattr("tfkit.console.output.PATIENCE", 0.05)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert main(["build", "tiny.yaml", "--no-plugins"]) == 0
    assert "building" in terminal.getvalue()


@pytest.mark.parametrize(
    ("lists", "rows"),
    [
        (["abd", "cadef"], "cabdef"),
        (["ab", "acb"], "acb"),
        (["", "ab"], "ab"),
        (["ab", "xy", "yb"], "xyab"),
    ],
)
def test_each_row_follows_its_predecessor_in_its_table(lists: list[str], rows: str) -> None:
    assert merge_rows([list(names) for names in lists]) == list(rows)

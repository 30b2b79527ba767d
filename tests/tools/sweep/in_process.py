"""The work of a sweep in this process, which is quicker than in new ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

from tfkit.cli import main
from tfkit.spec.folder import RUN
from tfkit.tools.common.atomic_files import write_file
from tfkit.tools.sweep import work
from tfkit.tools.sweep.arms import Cell


class InProcess:
    """In the place of `work`; `made` are the folders of the runs that it made."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, cells: Sequence[Cell], **_: Any) -> dict[str, str]:
        failed = {}
        for cell in work.missing(cells):
            cell.folder.mkdir(parents=True, exist_ok=True)
            write_file(cell.folder / RUN, work._text(cell.run))
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                status = main(["train", str(cell.folder), "--json"])
            if not work.is_complete(cell):
                failed[cell.run.digest] = f"status {status}"
            self.made.append(cell.folder.name)
        return failed

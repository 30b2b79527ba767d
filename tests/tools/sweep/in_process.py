"""Runs of a sweep in this process, which is faster than new processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

from tfkit.cli import main
from tfkit.spec.folder import RUN
from tfkit.tools.common.atomic_files import write_file
from tfkit.tools.sweep import work
from tfkit.tools.sweep.arms import SweepRun


class InProcess:
    """In the place of `work`; `made` are the folders of the runs that it made."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, runs: Sequence[SweepRun], **_: Any) -> dict[str, str]:
        failed = {}
        for sweep_run in work.missing_runs(runs):
            sweep_run.folder.mkdir(parents=True, exist_ok=True)
            write_file(sweep_run.folder / RUN, work._run_text(sweep_run.run))
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                status = main(["train", str(sweep_run.folder), "--json"])
            if not work.is_complete(sweep_run):
                failed[sweep_run.run.digest] = f"status {status}"
            self.made.append(sweep_run.folder.name)
        return failed

"""A folder with a small sweep and its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.runs import RUN, write_run

from .small import SWEEP, write


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, RUN + "eval: {every: 4, splits: {val: {batches: 2}}}\n")
    write(SWEEP, tmp_path)
    monkeypatch.chdir(tmp_path)

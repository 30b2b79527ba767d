"""A folder with a small sweep and its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from .small import write_files


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)

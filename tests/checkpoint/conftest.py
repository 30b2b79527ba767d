"""Fixtures of the checkpoint tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test in a folder of its own: the paths in errors are short, and the same everywhere."""
    monkeypatch.chdir(tmp_path)

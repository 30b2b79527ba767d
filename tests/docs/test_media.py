"""docs/media.md with its plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from .page import ROOT, follow, run


@pytest.mark.slow
def test_the_page_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    follow(ROOT / "docs" / "media.md", tmp_path, lambda command: run(command, capsys.readouterr))

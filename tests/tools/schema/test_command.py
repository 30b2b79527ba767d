"""The command `schema`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tfkit.cli import main

pytestmark = pytest.mark.usefixtures("specs")


def test_schema(run: Callable[..., str], specs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--no-plugins"]) == 0
    printed = capsys.readouterr().out
    run("schema", "-o", "schema.json")
    assert json.loads((specs / "schema.json").read_text()) == json.loads(printed)
    assert [path.name for path in specs.iterdir() if path.name.startswith(".")] == []

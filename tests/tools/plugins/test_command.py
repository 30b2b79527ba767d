"""The command `plugins`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.texts import BROKEN_PLUGIN, FAILING_PLUGIN

pytestmark = pytest.mark.usefixtures("specs")


def test_plugins(specs: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = specs / "plugins"
    folder.mkdir()
    (folder / "failing.py").write_text(FAILING_PLUGIN)
    (folder / "broken_one.py").write_text(BROKEN_PLUGIN)
    out = run("plugins", "--plugin-dir", "plugins")
    assert re.search(r"^failing .* 1 component$", out, re.MULTILINE)
    assert "broken: broken_one" in out
    assert "No module named 'there_is_no_such_module'" in out
    report = json.loads(run("plugins", "--plugin-dir", "plugins", "--json"))
    assert [plugin["name"] for plugin in report["loaded"]] == ["tfkit", "failing"]
    assert [plugin["name"] for plugin in report["broken"]] == ["broken_one"]
    monkeypatch.setenv("TFKIT_DISABLE", "failing")
    assert "switched off: failing" in run("plugins", "--plugin-dir", "plugins")

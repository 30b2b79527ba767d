"""The runs of the README fit their models and data."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import tfkit
from tfkit.run.checked_run import load_run

ROOT = Path(__file__).parents[1]
PLUGINS = tfkit.load_plugins(plugin_dirs=[ROOT], entry_points=False)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "runs").glob("*.yaml")), ids=lambda path: path.stem)
def test_runs_fit_their_data(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    run = load_run(Path(shutil.copy(path, tmp_path)), PLUGINS)
    assert run.config.loss.kind_name() == path.stem

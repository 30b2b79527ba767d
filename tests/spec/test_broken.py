"""A broken spec for each typical mistake, with the full text of its error."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import tfkit
from tfkit.plugin.manager import Plugins

ROOT = Path(__file__).parents[2]
SPECS = sorted(Path(__file__).parents[1].glob("broken/*.yaml"))
ERROR_COUNTS = {"several_mistakes": 4, "several_keys_missing": 2, "set_two_errors": 2}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_broken(
    path: Path, plugins: Plugins, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comment `# --set path=value` in a spec stands for that argument of the command line."""
    monkeypatch.chdir(ROOT)
    sets = re.findall(r"^# --set (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    with pytest.raises(tfkit.SpecError) as caught:
        tfkit.load(path.relative_to(ROOT), sets=sets, plugins=plugins)
    text = str(caught.value)
    assert len(caught.value.diagnostics) == ERROR_COUNTS.get(path.stem, 1), "one error for each mistake"
    assert max(map(len, text.split("\n"))) <= 120
    golden(f"broken/{path.stem}", text)


def test_every_golden_text_has_its_spec() -> None:
    texts = {path.stem for path in Path(__file__).parents[1].glob("golden/broken/*.txt")}
    assert texts == {path.stem for path in SPECS}
    assert len(SPECS) >= 60


def test_the_specs_are_right_but_for_one_mistake(plugins: Plugins) -> None:
    """What the broken specs were made from: without its mistake, each is accepted."""
    for base in ("tiny",):
        tfkit.load(Path(__file__).parents[1] / "broken" / "bases" / f"{base}.yaml", plugins=plugins)

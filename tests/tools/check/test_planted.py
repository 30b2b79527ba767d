"""Each planted bug breaks the property that is listed for it; without the bug, no property is broken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tfkit.components.attention_core import ScaledDotProduct

from ...sampling import some
from .models import measured, subject
from .planted import BUGS, Bug
from .planted.attention import first_is_larger

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("bug", some(BUGS, 16), ids=lambda bug: bug.bug)
def test_the_property_breaks(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = subject(bug.model)
    for owner, name, instead in bug.patches:
        monkeypatch.setattr(owner, name, instead)
    actual = measured(checked, bug.red)
    assert actual.status == "failed", "nothing sees it"
    assert actual.detail


@pytest.mark.parametrize("name", ["gpt2", "llama", "normed"])
def test_a_larger_head_is_seen_in_every_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(subject(name), "head-order").status == "ok"
    monkeypatch.setattr(ScaledDotProduct, "forward", first_is_larger)
    assert "heads in reverse order change the outputs by" in measured(subject(name), "head-order").detail


def test_slopes_belong_to_their_heads() -> None:
    assert measured(subject("bloom"), "head-order").status == "does not apply"


HELD = sorted({(bug.model, bug.red) for bug in BUGS})


@pytest.mark.parametrize(("name", "red"), some(HELD, 6))
def test_it_holds_without_the_bug(name: str, red: str) -> None:
    actual = measured(subject(name), red)
    assert actual.status == "ok", actual.detail


def test_the_page_has_each_bug_and_the_property_that_sees_it() -> None:
    page = (ROOT / "docs" / "check_bugs.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \| (?:\[(.*?)\].*?|(.*?)) \| `(.*?)`", page, re.MULTILINE)
    actual = {(bug, link or words, red) for bug, link, words, red in rows}
    assert {(bug.bug, bug.where, bug.red) for bug in BUGS} <= actual


def test_no_bug_is_there_twice() -> None:
    assert len({bug.bug for bug in BUGS}) == len(BUGS)

"""Each planted bug breaks the property that is said to see it; without the bug, nothing is broken."""

from __future__ import annotations

import pytest

from tfkit.tools.check.check import outcomes
from tfkit.tools.check.known import OWN
from tfkit.tools.check.measure import Outcome
from tfkit.tools.check.subject import Subject

from .models import PLUGINS, model
from .planted import BUGS, Bug


def measured(name: str, red: str) -> Outcome:
    (outcome,) = outcomes(Subject(model(name), PLUGINS), OWN.chosen([red]))
    return outcome


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.bug)
def test_the_property_breaks(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, instead in bug.patches:
        monkeypatch.setattr(owner, name, instead)
    found = measured(bug.model, bug.red)
    assert found.status == "failed", "nothing sees it"
    assert found.detail


@pytest.mark.parametrize(("name", "red"), sorted({(bug.model, bug.red) for bug in BUGS}))
def test_it_holds_without_the_bug(name: str, red: str) -> None:
    found = measured(name, red)
    assert found.status == "ok", found.detail

"""Fixtures for the tests of the spec language."""

from __future__ import annotations

import pytest
import yaml

from tfkit.spec import tree


@pytest.fixture(params=["C", "Python"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of PyYAML's parsers: where libyaml is missing, errors read the same."""
    if request.param == "C" and not hasattr(yaml, "CSafeLoader"):
        pytest.skip("PyYAML without libyaml")
    monkeypatch.setattr(tree, "_Loader", yaml.CSafeLoader if request.param == "C" else yaml.SafeLoader)

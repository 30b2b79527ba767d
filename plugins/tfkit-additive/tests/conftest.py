"""The test that the tutorial shows is slow, as it stands there without a mark; `test_in_specs.py` has a quick one."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.endswith("test_additive.py::test_it_has_every_property"):
            item.add_marker(pytest.mark.slow)

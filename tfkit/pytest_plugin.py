"""The option `--tfkit NAME` of pytest: every check of every component of an installed plugin, without any test.

    pytest --tfkit tfkit-additive

pytest loads this module wherever tfkit is installed, so it imports nothing that takes time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    group = parser.getgroup("tfkit")
    group.addoption("--tfkit", action="append", default=[], metavar="NAME", help="check the components of a plugin")


def pytest_collection(session: pytest.Session) -> None:
    """Refuse a plugin that is not there, before any test is run."""
    for name in session.config.getoption("--tfkit"):
        _components(name)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for each check of each component."""
    for name in config.getoption("--tfkit"):
        items += list(Components.from_parent(session, name=name, path=Path(name), nodeid=name).collect())


class Components(pytest.Collector):
    """The components of a plugin."""

    def __init__(self, *, path: Path, **given: Any) -> None:
        super().__init__(**given)

    def collect(self) -> Iterator[pytest.Item]:
        """A test for each model around a component, and each property."""
        from tfkit.tools.check.check import Work

        plugins, name = _components(self.name)
        work = Work(plugins)
        for subject, words in work.of_components(None, name):
            for one in work.properties:
                yield Measurement.from_parent(self, name=f"{words}: {one.name}", subject=subject, measured=one)


class Measurement(pytest.Item):
    """One property of one model."""

    def __init__(self, *, subject: Any, measured: Any, **given: Any) -> None:
        super().__init__(**given)
        self.subject, self.measured = subject, measured

    def runtest(self) -> None:
        """Measure the property."""
        from tfkit.tools.check.check import outcomes

        (found,) = outcomes(self.subject, [self.measured])
        if found.status == "does not apply":
            pytest.skip(found.detail)
        if found.status == "failed":
            pytest.fail(found.fault, pytrace=False)


def _components(name: str) -> tuple[Any, str]:
    """The plugins, and the name of the one that is meant; a usage error if it is not installed."""
    from tfkit.plugin.discover import canonical
    from tfkit.plugin.manager import load_plugins

    plugins = load_plugins()
    found = [one.name for one in plugins.loaded if canonical(one.name) == canonical(name)]
    if not found:
        known = ", ".join(one.name for one in plugins.loaded)
        raise pytest.UsageError(f"--tfkit: there is no plugin {name!r}; installed: {known}")
    return plugins, found[0]

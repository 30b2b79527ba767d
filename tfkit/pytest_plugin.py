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
    """Raise an error for a missing plugin before any test runs."""
    for name in session.config.getoption("--tfkit"):
        _components(name)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for each check of each component."""
    for name in config.getoption("--tfkit"):
        items += list(Components.from_parent(session, name=name, path=Path(name), nodeid=name).collect())


class Components(pytest.Collector):
    """The components of a plugin."""

    def __init__(self, *, path: Path, **arguments: Any) -> None:
        super().__init__(**arguments)

    def collect(self) -> Iterator[pytest.Item]:
        """Yield a test for each model around a component, and each property."""
        from tfkit.tools.check.check import Work

        plugins, name = _components(self.name)
        work = Work(plugins)
        for subject, words in work.of_components(None, name):
            for prop in work.properties(subject):
                yield Measurement.from_parent(self, name=f"{words}: {prop.name}", subject=subject, measured=prop)


class Measurement(pytest.Item):
    """One property of one model."""

    def __init__(self, *, subject: Any, measured: Any, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.subject, self.measured = subject, measured

    def runtest(self) -> None:
        """Measure the property."""
        from tfkit.tools.check.check import outcomes_of

        (outcome,) = outcomes_of(self.subject, [self.measured])
        if outcome.status == "does not apply":
            pytest.skip(outcome.detail)
        if outcome.status == "failed":
            pytest.fail(outcome.fault, pytrace=False)


def _components(name: str) -> tuple[Any, str]:
    """Return the plugins and the name of the requested plugin; a plugin that is not installed is a usage error."""
    from tfkit.plugin.discover import normalized_name
    from tfkit.plugin.manager import load_plugins

    plugins = load_plugins()
    matches = [plugin.name for plugin in plugins.loaded if normalized_name(plugin.name) == normalized_name(name)]
    if not matches:
        installed = ", ".join(plugin.name for plugin in plugins.loaded)
        raise pytest.UsageError(f"--tfkit: there is no plugin {name!r}; installed: {installed}")
    return plugins, matches[0]

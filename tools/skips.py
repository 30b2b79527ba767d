"""Compare the tests that are skipped with tests/skips.txt: a pytest plugin, for `make test-all`.

    pytest -p tools.skips -m ""                  fail if a test is skipped that the list does not have with its reason
    pytest -p tools.skips -m "" --renew-skips    add the skipped tests to the list

A line of the list is a function or a file, and a reason. Tests of the list may run: a machine with a GPU, or an
environment with more packages, skips fewer of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

LIST = Path(__file__).parent.parent / "tests" / "skips.txt"


def read_list() -> set[tuple[str, str]]:
    """Return the functions of the list with their reasons."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return {(function, reason) for function, _, reason in (line.partition("  ") for line in lines)}


class Skips:
    """The functions that were skipped, with their reasons."""

    def __init__(self, *, renew: bool) -> None:
        self.renew = renew
        self.skips: set[tuple[str, str]] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Store the reason of a skipped test or file; expected failures are no skips."""
        if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
            self.skips.add((report.nodeid.partition("[")[0], report.longrepr[2].removeprefix("Skipped: ")))

    pytest_collectreport = pytest_runtest_logreport

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Let the run fail for a skip that is not listed."""
        if self.renew:
            rows = sorted(read_list() | self.skips)
            LIST.write_text("".join(f"{function}  {reason}\n" for function, reason in rows), encoding="utf-8")
        elif self.skips - read_list() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the skips that are not listed."""
        for function, reason in sorted(self.skips - read_list()):
            terminalreporter.write_line(f"SKIPPED without an entry in tests/skips.txt: {function}  {reason}", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--renew-skips", action="store_true", help="add the skipped tests to tests/skips.txt")


def pytest_configure(config: pytest.Config) -> None:
    """Collect skips in the process that has the reports of all tests."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(renew=config.getoption("--renew-skips")), "skips")

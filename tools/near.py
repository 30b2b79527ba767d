"""Select the tests that a difference concerns, the slow ones too: a pytest plugin, for `make test-near`.

    pytest -p tools.near -m "" --near main              the difference between the working tree and main
    pytest -p tools.near -m "" --near main --budget 60  at most about 60 s of tests; the default is 150

The difference is `git diff` from the merge base, and new files that git does not ignore. A test is near for
one of four reasons, in this order:

1. its file is part of the difference, imports a changed module of the tests, or quotes the name of a changed file that
   is not Python;
2. its file mirrors a changed module: `tests/spec/test_merge.py` or `test_merge_lists.py` for `tfkit/spec/merge.py`;
3. a word in its parameters names a changed file (a spec, a family, a golden file), a kind that a changed module
   declares, or an entry of a changed list of cases; words that name few tests come first;
4. it is in the folder that mirrors the folder of a changed module, or next to a changed conftest.py.

Tests are taken in this order, and quick tests first, until their known seconds exceed the budget; the names of
the remaining tests are printed. `tools/ledger.py` knows the seconds. The near tests detect most faults early. They do
not prove a commit: `make proof` does.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools import ledger

ROOT = Path(__file__).parent.parent
KIND = re.compile(r"""^ +kind: Literal\["(\w+)"\]""", re.MULTILINE)
ENTRY = re.compile(r"""["']([^"'\n]+)["']|^ *(?:- )?([\w-]+):""", re.MULTILINE)
DROPPED = pytest.StashKey[list[str]]()
QUOTING = ("tests/planted.yaml", "tests/mutants.yaml", "CHANGELOG.md")
"""Files that quote code and cases without being cases."""
COMMON = 400
"""Number of tests from which on a word says nothing about a difference."""


@dataclass(frozen=True)
class Difference:
    """Changed files, and the added lines of each."""

    lines: Mapping[str, str]

    @classmethod
    def from_git(cls, base: str) -> Difference:
        """Return the difference between the working tree and its merge base with `base`."""
        start = _git("merge-base", base, "HEAD").strip()
        texts = _git("diff", "--no-color", "--no-ext-diff", "--no-renames", "--unified=0", start).split("diff --git ")[
            1:
        ]
        lines = {}
        for text in texts:
            head, _, hunks = text.partition("\n@@")
            name = re.findall(r"^(?:---|\+\+\+) [ab]/(.+)$", head, re.MULTILINE) or [
                head.split(" b/")[-1].split("\n")[0]
            ]
            lines[name[-1]] = "\n".join(line[1:] for line in hunks.split("\n") if line[:1] in ("+", "-"))
        for name in filter(None, _git("ls-files", "-z", "--others", "--exclude-standard").split("\0")):
            lines[name] = (ROOT / name).read_text(encoding="utf-8", errors="replace")
        return cls(lines)

    def words(self) -> set[str]:
        """Return the words that may name changed cases, in parameters of tests."""
        words = set()
        for name, text in self.lines.items():
            path = Path(name)
            if name in QUOTING:
                continue
            if path.suffix != ".py":
                words.add(path.stem)
            elif not is_test(name):
                source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
                words |= {*KIND.findall(source), *KIND.findall(text)}
            if path.parts[0] in ("tests", "specs") or "tests" in path.parts:
                words |= {word for pair in ENTRY.findall(text) for word in pair if word}
        return words

    def distance(self, file: str, text: str) -> int:
        """Return the reason, 1, 2 or 4, why the tests of a file are near; 9 if they are not."""
        data = [Path(name) for name in self.lines if not name.endswith(".py")]
        modules = [Path(name) for name in self.lines if name.endswith(".py") and not is_test(name)]
        helpers = [Path(name) for name in self.lines if name.endswith(".py") and is_test(name)]
        if (
            file in self.lines
            or any(_quotes(text, path) for path in data)
            or any(_imports(Path(file), text, path) for path in helpers)
        ):
            return 1
        path = Path(file)
        if any(path.parent == mirror(module) and _named_for(path, module) for module in modules):
            return 2
        folders = {*map(mirror, modules), *(helper.parent for helper in helpers if helper.name == "conftest.py")}
        return 4 if path.parent in folders else 9


def is_test(name: str) -> bool:
    """Return True for a file of tests, and for the modules next to it that only tests import."""
    return name.startswith("tests/") or "/tests/" in name


def mirror(module: Path) -> Path:
    """Return the folder of the tests of a module."""
    if module.parts[0] == "plugins":
        return Path(*module.parts[:2], "tests")
    return Path("tests", *module.parts[1:-1]) if module.parts[0] == "tfkit" else Path("tests")


def near(tests: Sequence[tuple[str, float]], difference: Difference, budget: float) -> tuple[set[str], list[str]]:
    """Choose from pairs of a test and its seconds. Return the tests within the budget, and those that are too much."""
    words = difference.words()
    named = {test: words & words_of(test) for test, _ in tests}
    counts = Counter(word for matches in named.values() for word in matches)
    files = {test.partition("::")[0] for test, _ in tests}
    distances = {file: difference.distance(file, (ROOT / file).read_text(encoding="utf-8")) for file in files}
    order = []
    for test, seconds in tests:
        distance = distances[test.partition("::")[0]]
        count = min((counts[word] for word in named[test]), default=COMMON)
        if count < COMMON and distance > 3:
            order.append((3, count, seconds, test))
        elif distance < 9:
            order.append((distance, 0, seconds, test))
    chosen, dropped, total = set(), [], 0.0
    for *_, seconds, test in sorted(order):
        if total + seconds > budget:
            dropped.append(test)
        else:
            total += seconds
            chosen.add(test)
    return chosen, dropped


def words_of(test: str) -> set[str]:
    """Return the words in the parameters of a test: the full text, and its parts between hyphens, commas and spaces."""
    parameters = test.partition("[")[2].removesuffix("]")
    return {parameters, *re.split(r"[-, ]", parameters)} - {""}


def _quotes(text: str, path: Path) -> bool:
    """Return True if the text of a test names a file: its last name, or for a golden file its path without suffix."""
    if path.parts[:2] == ("tests", "golden"):
        return f'"{Path(*path.parts[2:]).with_suffix("")}"' in text
    return re.search(rf"(?<![\w.]){re.escape(path.name)}(?!\w)", text) is not None


def _imports(test: Path, text: str, module: Path) -> bool:
    """Return True if the text of a test imports a module of the tests, by its full name or from the same folder."""
    folders = [re.escape(".".join(module.parent.parts)), *([""] if test.parent == module.parent else [])]
    names = "|".join(
        rf"{folder}\.{module.stem} import|{folder or '[.]'} import .*\b{module.stem}\b" for folder in folders
    )
    return re.search(f"from (?:{names})", text) is not None


def _named_for(test: Path, module: Path) -> bool:
    return re.fullmatch(rf"test_{re.escape(module.stem.strip('_'))}(_\w+)?", test.stem) is not None


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=ROOT, check=False, capture_output=True, text=True)
    if result.returncode:
        raise pytest.UsageError(f"git {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout


# ---- pytest ----


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("near")
    group.addoption("--near", metavar="COMMIT", help="only tests that the difference to this commit concerns")
    group.addoption(
        "--budget", type=float, default=150, metavar="SECONDS", help="of the near tests, one after the other"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are not near."""
    base = config.getoption("--near")
    if base is None:
        return
    seconds = ledger.known_seconds()
    tests = [(item.nodeid, seconds.get(item.nodeid, guess(item))) for item in items]
    chosen, dropped = near(tests, Difference.from_git(base), config.getoption("--budget"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]
    output = getattr(config, "workeroutput", None)
    (config.stash.setdefault(DROPPED, []) if output is None else output.setdefault("dropped", [])).extend(dropped)


def guess(item: pytest.Item) -> float:
    """Return the seconds of a test that has never run."""
    return 5.0 if item.get_closest_marker("slow") else 0.1


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Store the dropped tests of a worker: all workers drop the same tests."""
    node.config.stash[DROPPED] = node.workeroutput.get("dropped", [])  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how many tests of each file exceed the budget."""
    counts = Counter(test.partition("[")[0] for test in config.stash.get(DROPPED, []))
    if counts:
        budget = config.getoption("--budget")
        terminalreporter.write_line(f"{counts.total()} near tests exceed the budget of {budget:g} s and did not run:")
        for test, count in counts.most_common(20):
            terminalreporter.write_line(f"{count:6} {test}")
        if len(counts) > 20:
            terminalreporter.write_line(f"       and {len(counts) - 20} further functions")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let a difference that concerns no test pass."""
    if session.config.getoption("--near") is not None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK

"""Mutate random places of the numeric core of tfkit, and report the mutants that no quick test detects.

    python tools/mutants.py                      300 mutants, drawn by the date, with two workers
    python tools/mutants.py --sample 60 --seed 7 --workers 16
    python tools/mutants.py --again REPORT       the survivors of a report, after a change of the tests
    python tools/mutants.py --only rope          places whose file contains `rope`
    python tools/mutants.py --table REPORT       print a report as a table; `tests/mutants.md` has the latest tables

`tools/mutants.yaml` names the files, the operators of cosmic-ray and the tests. Each mutant runs tests that run the
mutated statement: first the tests of the mirrored folder, then the fastest. It stops at the first failure.
The statements that each test runs are measured once and stored in out/mutants; later runs measure only changed files of
tests. `tests/mutants.yaml` lists the mutants that compute the same as the code, and the mutants without a test, with
their reasons; they are not run. The working tree itself is never changed. It needs the groups
`test` and `mutants` of pyproject.toml, and no network.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import random
import resource
import shlex
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import parso
import pytest
import yaml
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from planted import ARGUMENTS, ROOT, TIMED_OUT, copy_of, failure_in, run_pytest, write

CONFIG = ROOT / "tools" / "mutants.yaml"
LISTED = ROOT / "tests" / "mutants.yaml"
OUT = ROOT / "out" / "mutants"
Key = tuple[str, str, str]
Location = str
MEMORY = 12 << 30
"""Bytes that the tests of a mutant may allocate: a mutant may try to allocate any amount."""


@dataclass(frozen=True)
class Mutant:
    """A change of a single place in a file."""

    file: str
    line: int
    location: Location
    operator: str
    before: str
    after: str

    @property
    def key(self) -> Key:
        """The file, and the changed line before and after the change. Lists identify a mutant by this key."""
        return self.file, self.before, self.after


@dataclass(frozen=True)
class Task:
    """A mutant, the text of its file, and the tests to run, in order."""

    mutant: Mutant
    text: str
    tests: tuple[str, ...]
    related: int
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """The test that detected a mutant; None if no test did."""

    task: Task
    test: str | None


# ---- mutants ----


@cache
def operators() -> Mapping[str, Any]:
    """Return the operators of cosmic-ray that the configuration names, by name."""
    prefixes = tuple(f"core/{name}" for name in config()["operators"])
    return {name: get_operator(name)() for name in operator_names() if name.startswith(prefixes)}


@cache
def config() -> Mapping[str, list[str]]:
    """Return the configuration."""
    return yaml.safe_load(CONFIG.read_text(encoding="utf-8"))


def target_files() -> list[str]:
    """Return the names of the mutated files."""
    paths = {path for pattern in config()["files"] for path in ROOT.glob(pattern)}
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


@dataclass(frozen=True)
class Position:
    """A range of a file with the operators that change it: pairs of an operator and the index of its occurrence."""

    file: str
    start: tuple[int, int]
    changes: tuple[tuple[str, int], ...]


def positions_in(file: str) -> Iterator[Position]:
    """Yield the places of a file that compute something, without types and messages of errors."""
    text = (ROOT / file).read_text(encoding="utf-8")
    silent = list(_silent_ranges(ast.parse(text)))
    nodes = list(ast_nodes(parso.parse(text)))
    changes: dict[tuple[tuple[int, int], tuple[int, int]], list[tuple[str, int]]] = defaultdict(list)
    for name, operator in operators().items():
        positions = [position for node in nodes for position in operator.mutation_positions(node)]
        for index, position in enumerate(positions):
            changes[position].append((name, index))
    for (start, end), operations in changes.items():
        if not any(first <= start and end <= last for first, last in silent):
            yield Position(file, start, tuple(operations))


def _silent_ranges(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the ranges that compute no number: annotations, `raise` with its message, and texts of modules.

    Further ranges are the `*` of a signature, and `strict` of `zip`, which asserts equal lengths.
    """
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            parts = [node if node.name == "extra_repr" else node.returns]
            if node.args.kwonlyargs and node.args.vararg is None:
                positional = [node.args.posonlyargs, node.args.args, node.args.defaults]
                ends = [(part.end_lineno, part.end_col_offset) for part in chain(*positional)]
                first = node.args.kwonlyargs[0]
                yield max(ends, default=(node.lineno, node.col_offset)), (first.lineno, first.col_offset)
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.keyword) and node.arg in ("strict", "help", "note")):
            parts = [node]
        for part in parts:
            if part is not None:
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def mutant_at(site: Position, operator: str, index: int) -> tuple[Mutant, str] | None:
    """Return a mutant and the text of its file; None if the text is not valid Python, or unchanged."""
    text = (ROOT / site.file).read_text(encoding="utf-8")
    changed = mutate_code(text, operators()[operator], index)
    try:
        trees = [ast.parse(version) for version in (text, changed or text)]
        if changed is None or ast.dump(trees[0]) == ast.dump(trees[1]) or len({*map(_odd_comparisons, trees)}) > 1:
            return None
    except SyntaxError:
        return None
    before, after = next(pair for pair in zip(text.split("\n"), changed.split("\n"), strict=False) if len({*pair}) > 1)
    location = locations(site.file).get(site.start[0], "")
    name = operator.removeprefix("core/")
    return Mutant(site.file, site.start[0], location, name, before.strip(), after.strip()), changed


def _odd_comparisons(tree: ast.Module) -> int:
    """Count unusual comparisons: the order of a text, and the identity of a text or a number."""
    count = 0
    for node in ast.walk(tree):
        for operation, value in zip(node.ops, node.comparators, strict=True) if isinstance(node, ast.Compare) else ():
            if isinstance(value, ast.Constant) and isinstance(value.value, str | int | float | complex):
                text = isinstance(value.value, str) and isinstance(operation, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
                count += text or isinstance(operation, ast.Is | ast.IsNot)
    return count


@cache
def locations(file: str) -> Mapping[int, Location]:
    """Return the location of each line in a function: the qualified name, and the index of the statement in it.

    Changes of the file outside the function do not change a location. Lines of nested functions belong to the outermost
    function.
    """
    table: dict[int, Location] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                for statement in ast.walk(child):
                    if isinstance(statement, ast.stmt) and statement is not child:
                        body = getattr(statement, "body", None)
                        last = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
                        for line in range(statement.lineno, max(last, statement.lineno) + 1):
                            table[line] = f"{prefix}{child.name}:{statement.lineno - child.lineno}"

    visit(ast.parse((ROOT / file).read_text(encoding="utf-8")), "")
    return table


def sample(locations: Sequence[Position], count: int, seed: int, listed: Set[Key]) -> list[tuple[Mutant, str]]:
    """Draw mutants: first places, then a change of each place, so that places with many changes count once."""
    generator = random.Random(seed)
    mutants: list[tuple[Mutant, str]] = []
    for location in generator.sample(locations, len(locations)):
        if len(mutants) == count:
            break
        result = mutant_at(location, *generator.choice(location.changes))
        if result is not None and result[0].key not in listed:
            mutants.append(result)
    return mutants


def survivors_of(path: Path, locations: Iterable[Position]) -> list[tuple[Mutant, str]]:
    """Return the survivors in a report that still exist in the current code."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))["survivors"]
    keys = {(entry["file"], entry["before"], entry["after"]) for entry in entries}
    lines = {(file, before) for file, before, _ in keys}
    mutants = {}
    for location in locations:
        line = (ROOT / location.file).read_text(encoding="utf-8").split("\n")[location.start[0] - 1].strip()
        for change in location.changes if (location.file, line) in lines else ():
            result = mutant_at(location, *change)
            if result is not None and result[0].key in keys:
                mutants[result[0].key] = result
    for key in keys - mutants.keys():
        print(f"stale: {key}")
    return list(mutants.values())


# ---- the locations that each test runs ----


class Recorder:
    """A pytest plugin that records the locations that each passed test executes, and its duration in seconds."""

    def __init__(self, tree: Path, path: Path) -> None:
        self.files = {str(tree / file): file for file in target_files()}
        self.path = path
        self.tests: dict[str, Any] = {}
        self.failed: set[str] = set()
        self.lines: set[tuple[str, int]] = set()

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._on_line if frame.f_code.co_filename in self.files else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._on_line

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.lines.clear()
        start = time.perf_counter()
        sys.settrace(self._on_call)
        threading.settrace(self._on_call)
        yield
        sys.settrace(None)
        threading.settrace(None)
        seconds = time.perf_counter() - start
        reached: dict[str, set[str]] = defaultdict(set)
        for path, line in self.lines:
            if line in locations(self.files[path]):
                reached[self.files[path]].add(locations(self.files[path])[line])
        if item.nodeid not in self.failed:
            files = {file: sorted(names) for file, names in reached.items()}
            self.tests[item.nodeid] = {"seconds": round(seconds, 4), "files": files}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.tests), encoding="utf-8")


def measure(file: str) -> tuple[str, dict[str, Any]]:
    """Run the tests of a file; return the locations that each of them runs."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        path = Path(folder) / "tests.json"
        arguments = [argument for argument in ARGUMENTS if argument != "-x"]
        run_pytest(TREE, [*arguments, f"--basetemp={folder}/pytest", file], plugins=[Recorder(TREE, path)], seconds=900)
        return file, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


class Reached:
    """The tests that execute each location, with their durations in seconds."""

    def __init__(self, tests: Mapping[str, Any]) -> None:
        self.seconds = {test: values["seconds"] for test, values in tests.items()}
        self.by_location: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.by_file: dict[str, set[str]] = defaultdict(set)
        for test, values in tests.items():
            for file, names in values["files"].items():
                self.by_file[file].add(test)
                for name in names:
                    self.by_location[file, name].add(test)

    def task(self, mutant: Mutant, text: str, limit: float) -> Task:
        """Choose the tests of a mutant: first the tests that run its location, then other tests of its file.

        The location does not suffice. Scripted functions execute no line of Python, and a value that a process caches
        is computed only in a single test. Lines outside functions, which are defaults of fields, run during the import:
        the configuration names their tests.
        """
        mirrored = Path("tests", *Path(mutant.file).parts[1:-1]).as_posix() + "/"
        direct = self.by_location[mutant.file, mutant.location] if mutant.location else {*config()["tests_of_defaults"]}

        def order(test: str) -> tuple[bool, bool, float]:
            return test not in direct, not test.startswith(mirrored), self.seconds[test]

        tests, total = [], 0.0
        for test in sorted(self.by_file[mutant.file] | direct, key=order):
            if tests and total + self.seconds[test] > limit:
                break
            tests.append(test)
            total += self.seconds[test]
        return Task(mutant, text, tuple(tests), len(direct), 60 + 4 * total)


def read_reached(pool: Any, *, anew: bool) -> Reached:
    """Return the locations of all tests; measure files of tests that are new or have changed, or all of them."""
    path = OUT / "reached.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() and not anew else {}
    files = [file for name in config()["tests"] for file in [ROOT / name, *sorted((ROOT / name).rglob("test_*.py"))]]
    digests = {
        file.relative_to(ROOT).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.is_file()
    }
    stored = {file: entry for file, entry in stored.items() if entry["digest"] == digests.get(file)}
    missing = [file for file in digests if file not in stored]
    try:
        for number, (file, tests) in enumerate(pool.imap_unordered(measure, missing), 1):
            stored[file] = {"digest": digests[file], "tests": tests}
            print(f"measured {number} of {len(missing)}: {file}, {len(tests)} tests", flush=True)
    finally:
        write_out(path, json.dumps(stored))
    return Reached({test: values for entry in stored.values() for test, values in entry["tests"].items()})


def write_out(path: Path, text: str) -> None:
    """Write a file of out/mutants."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# ---- running ----


class Chosen:
    """A pytest plugin that selects tests, and runs them in a given order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.places = {test: location for location, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.places), key=lambda item: self.places[item.nodeid]
        )

    def pytest_sessionstart(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def start_worker(folder: str) -> None:
    """Copy the working tree for a process of the pool."""
    global TREE  # noqa: PLW0603  each process has its own
    TREE = copy_of(ROOT, Path(tempfile.mkdtemp(dir=folder)))


def run_task(deadline: float, task: Task) -> Verdict | None:
    """Run the tests of a mutant in the tree of this worker; return None after the deadline."""
    if time.monotonic() > deadline:
        return None
    if not task.tests:
        return Verdict(task, None)
    path = TREE / task.mutant.file
    before = path.read_text(encoding="utf-8")
    write(path, task.text)
    try:
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            files = list(dict.fromkeys(test.partition("::")[0] for test in task.tests))
            arguments = [*ARGUMENTS, f"--basetemp={folder}/pytest", *files]
            status, output = run_pytest(TREE, arguments, plugins=[Chosen(task.tests)], seconds=task.seconds)
    finally:
        write(path, before)
    if status == pytest.ExitCode.OK:
        return Verdict(task, None)
    return Verdict(task, "(no end)" if status == TIMED_OUT else failure_in(output, status))


def report_of(verdicts: Sequence[Verdict], command: str, seed: int) -> str:
    """Return the report as YAML."""
    survivors = [
        asdict(verdict.task.mutant) | {"tests": f"{len(verdict.task.tests)}, of them direct {verdict.task.related}"}
        for verdict in verdicts
        if verdict.test is None
    ]
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for verdict in verdicts:
        room = rooms[Path(verdict.task.mutant.file).parent.as_posix()]
        room[0] += 1
        room[1] += verdict.test is None
    head = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "seed": seed,
        "mutants": len(verdicts),
        "killed": len(verdicts) - len(survivors),
        "without_end": sum(verdict.test == "(no end)" for verdict in verdicts),
        "rooms": dict(sorted(rooms.items())),
    }
    return yaml.safe_dump({**head, "survivors": survivors}, sort_keys=False, width=1000, allow_unicode=True)


def entries_of(section: str) -> dict[Key, str]:
    """Return the reasons of the mutants in a section of the list."""
    entries = yaml.safe_load(LISTED.read_text(encoding="utf-8"))[section]
    return {(entry["file"], entry["before"], entry["after"]): entry["reason"] for entry in entries}


def table_of(report: Mapping[str, Any]) -> str:
    """Return a report as Markdown, with the test or the reason of each survivor.

    `killed_by` of a survivor, in the report, is a test that was written later.
    """
    reasons = {word: entries_of(word) for word in ("equivalent", "without_test")}
    rows, counts = [], defaultdict[str, int](int)
    for entry in report["survivors"]:
        key = entry["file"], entry["before"], entry["after"]
        listed = next(((word, texts[key]) for word, texts in reasons.items() if key in texts), None)
        word, text = listed or (("killed", f"`{entry['killed_by']}`") if "killed_by" in entry else ("open", ""))
        counts[word] += 1
        location = f"{entry['file'].removeprefix('tfkit/')}:{entry['line']}"
        change = "<br>".join(f"`{entry[side].replace('|', chr(92) + '|')}`" for side in ("before", "after"))
        rows.append(f"| {location} | {change} | {word.replace('_', ' ')} | {text.replace('|', chr(92) + '|')} |")
    lines = [
        f"{report['date']}, `{report['command']}`, seed {report['seed']}:",
        f"{report['mutants']} mutants, {report['killed']} killed, of them {report['without_end']} without end,",
        f"{len(rows)} survivors: " + ", ".join(f"{count} {word.replace('_', ' ')}" for word, count in counts.items()),
        *["", "| folder | mutants | survivors |", "|---|---|---|"],
        *(f"| {room} | {drawn} | {left} |" for room, (drawn, left) in report["rooms"].items()),
        *["", "| place | change | now | test or reason |", "|---|---|---|---|", *sorted(rows)],
    ]
    return "\n".join(lines)


def main() -> int:
    """Run a sample. Return 0 only if every mutant was detected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sample", type=int, default=300, help="how many mutants")
    parser.add_argument("--seed", type=int, default=int(f"{datetime.now(UTC):%Y%m%d}"), help="default: the date")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=40, help="of tests for each mutant")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no mutant after this time")
    parser.add_argument("--only", metavar="WORD", default="", help="only places whose file contains it")
    parser.add_argument("--again", type=Path, metavar="REPORT", help="the survivors of a report")
    parser.add_argument("--remeasure", action="store_true", help="measure the locations of all tests again")
    parser.add_argument("--report", type=Path, default=OUT / "report.yaml")
    parser.add_argument("--table", type=Path, metavar="REPORT", help="print a report as a table")
    options = parser.parse_args()
    if options.table:
        print(table_of(yaml.safe_load(options.table.read_text(encoding="utf-8"))))
        return 0
    deadline = time.monotonic() + 60 * options.minutes
    context = multiprocessing.get_context("fork")
    verdicts: list[Verdict] = []
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        context.Pool(options.workers, start_worker, (folder,)) as pool,
    ):
        reached = read_reached(pool, anew=options.remeasure)
        locations = [location for file in target_files() if options.only in file for location in positions_in(file)]
        listed = entries_of("equivalent").keys() | entries_of("without_test").keys()
        if options.again:
            mutants = survivors_of(options.again, locations)
        else:
            mutants = sample(locations, options.sample, options.seed, listed)
        tasks = [reached.task(mutant, text, options.seconds) for mutant, text in mutants]
        command = shlex.join(["python", "tools/mutants.py", *sys.argv[1:]])
        for verdict in pool.imap_unordered(partial(run_task, deadline), tasks):
            if verdict is None:
                continue
            verdicts.append(verdict)
            mutant = verdict.task.mutant
            print(f"{len(verdicts):3} {'killed' if verdict.test else 'SURVIVED'}  {mutant.file}:{mutant.line}")
            print(f"    - {mutant.before}\n    + {mutant.after}\n    {verdict.test or '-'}", flush=True)
            write_out(options.report, report_of(verdicts, command, options.seed))
    survivors = sum(verdict.test is None for verdict in verdicts)
    print(f"\n{len(verdicts) - survivors} of {len(verdicts)} killed; {len(locations)} places; report: {options.report}")
    return int(survivors > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")

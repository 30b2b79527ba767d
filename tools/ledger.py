"""Record the results of tests with the files that they depend on: a pytest plugin, for `make test` and `make proof`.

    pytest -p tools.ledger                     record results in out/ledger
    pytest -p tools.ledger -m "" --unproved    run only tests without a green result for the current files: `make proof`

A result is valid for the digest of everything that the test depends on, and for an environment: Python, the versions of
all packages, whether there is a GPU. A test depends on

- the file of the test, the files `conftest.py` above it, and what these import, directly or indirectly, also inside of
  functions, by the name of a module in a string, and by `importlib.import_module` while the test runs;
- the files that it opens and the folders that it lists, below the root of the repository;
- the same for fixtures of a wider scope, for values that `functools.cache` returns, and for modules that are imported
  once per process: what was opened when an earlier test computed the value counts for each later test that takes it;
- all code and specs if it starts a process, and all files if the process runs inside of the repository. Compilers, and
  programs that describe the machine, do not count.

Digests are taken before the first import. A result is dropped if a file that it depends on changes during the run. What
the ledger cannot see: a value that a test stores for a later test in other ways than these; a file that compiled code
opens; and the absence of a file, unless the test lists the folder.
"""

from __future__ import annotations

import _posixsubprocess
import ast
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import _lru_cache_wrapper, cached_property
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PREFIX = f"{ROOT}{os.sep}"
FOLDER = ROOT / "out" / "ledger"
GREEN = ("passed", "skipped", "xfailed")
HARMLESS = {
    "cc",
    "c++",
    "gcc",
    "g++",
    "clang",
    "clang++",
    "as",
    "ld",
    "ldconfig",
    "uname",
    "lscpu",
    "nvidia-smi",
    "sysctl",
}
"""Programs that read no file of the repository."""
CODE, ALL_FILES = "code", "everything"
"""Uses of a test that starts a process; the other uses are `module:FILE`, `file:FILE` and `folder:FOLDER`."""
PROCESS_EVENTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
MODULE_NAME = re.compile(r"(?:tfkit|tests|tools)\w*(?:\.\w+)+")
INTERVAL = 20.0
"""Seconds between two looks at the files."""
IMPORTS = "imports.json"
"""Names of modules in each file, by the digest of the file, so that each version of a file is parsed once."""


# ---- files and their digests ----


class Tree:
    """The files of the repository at one time: their digests, and what each module imports."""

    def __init__(self) -> None:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        self.stamps = self._stamps(name for name in names if name)
        self.digests = {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in self.stamps}
        self.folders: dict[str, set[str]] = defaultdict(set)
        for name in self.digests:
            path = Path(name)
            for child in (path, *path.parents[:-1]):
                self.folders[child.parent.as_posix()].add(child.name)
        self.modules = {module_name(name): name for name in self.digests if name.endswith(".py")}
        self._names = self._read_names()
        self._edges: dict[str, frozenset[str]] = {}
        self._closures: dict[str, frozenset[str]] = {}
        self._uses: dict[str, str] = {}

    @staticmethod
    def _stamps(names: Iterable[str]) -> dict[str, tuple[int, int]]:
        stamps = {}
        for name in names:
            try:
                status = os.stat(PREFIX + name)
            except FileNotFoundError:
                continue  # removed, but not yet in the index
            stamps[name] = status.st_mtime_ns, status.st_size
        return stamps

    def changed(self) -> set[str]:
        """Return the files that have changed since this tree was read."""
        now = self._stamps(self.stamps)
        return {name for name, stamp in self.stamps.items() if now.get(name) != stamp}

    @cached_property
    def homes(self) -> Mapping[str, str]:
        """The module of each public name of tfkit."""
        stub = (ROOT / "tfkit" / "__init__.pyi").read_text(encoding="utf-8")
        return {name: home for home, name in re.findall(r"^from (\S+) import (\w+) as", stub, re.MULTILINE)}

    def closure(self, file: str) -> frozenset[str]:
        """Return a module, and all modules of the repository that it imports, directly or indirectly."""
        if file not in self._closures:
            reached, waiting = {file}, [file]
            while waiting:
                new = self.edges(waiting.pop()) - reached
                reached |= new
                waiting += new
            self._closures[file] = frozenset(reached)
        return self._closures[file]

    def edges(self, file: str) -> frozenset[str]:
        """Return the modules of the repository that a module names: imports, public names, strings; and conftest.py."""
        if file not in self._edges:
            names = self._names[self._key(file)]
            public = {name.split(".")[1] for name in names if name.startswith("tfkit.")}
            names = [*names, *(self.homes[name] for name in public & self.homes.keys())]
            files = {self.modules[prefix] for name in names for prefix in prefixes(name) if prefix in self.modules}
            above = [*Path(file).parents] if is_test(file) else []
            files |= {f"{folder.as_posix()}/conftest.py" for folder in above} & self.digests.keys()
            self._edges[file] = frozenset(files - {file})
        return self._edges[file]

    def _key(self, file: str) -> str:
        return f"{file} {self.digests[file]}"

    def _read_names(self) -> dict[str, list[str]]:
        """Return the names in each module, from the file of an earlier process where the digest is the same."""
        path = FOLDER / IMPORTS
        try:
            stored = json.loads(path.read_bytes())
        except (OSError, ValueError):
            stored = {}
        files = {self._key(file): file for file in self.modules.values()}
        names = {key: stored[key] if key in stored else sorted(self._names_in(file)) for key, file in files.items()}
        if names.keys() != stored.keys():
            FOLDER.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(names), encoding="utf-8")
            temporary.rename(path)
        return names

    def _names_in(self, file: str) -> set[str]:
        """Return the names of modules in the imports, attributes and strings of a file."""
        names: set[str] = set()
        try:
            tree = ast.parse((ROOT / file).read_bytes())
        except SyntaxError:  # no test that imports it is green
            return names
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(filter(None, [self._package(Path(file), node.level), node.module]))
                names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tfkit":
                names.add(f"tfkit.{node.attr}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE_NAME.fullmatch(node.value):
                names.add(node.value)
        return names

    def _package(self, path: Path, level: int) -> str:
        """Return the package that a relative import begins with."""
        if not level:
            return ""
        name = module_name(path.as_posix())
        parts = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        return ".".join(parts[: len(parts) - level + 1])

    def digest(self, uses: Iterable[str]) -> str:
        """Return the digest of all that a test uses."""
        return digest_of(self._digest_of_use(use) for use in sorted(uses))

    def _digest_of_use(self, use: str) -> str:
        if use not in self._uses:
            self._uses[use] = digest_of([use, *self._contents(use)])
        return self._uses[use]

    def _contents(self, use: str) -> Iterator[str]:
        kind, _, name = use.partition(":")
        if kind == "folder":
            yield from sorted(self.folders.get(name, ()))
        else:
            for file in sorted(self.files_of(use)):
                yield f"{file} {self.digests.get(file)}"

    def files_of(self, use: str) -> Iterable[str]:
        """Return the files whose contents a use depends on."""
        kind, _, name = use.partition(":")
        if kind == "module":
            return self.closure(name) if name in self.digests else [name]
        if kind == "file":
            return [name]
        return [file for file in self.digests if use == ALL_FILES or (use == CODE and is_code(file))]


def module_name(file: str) -> str:
    """Return the name under which Python imports a file."""
    parts = list(Path(file).with_suffix("").parts)
    if parts[0] == "plugins" and "src" in parts:
        parts = parts[parts.index("src") + 1 :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def prefixes(name: str) -> Iterator[str]:
    """Yield a dotted name, and the names of the packages that it is in."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def is_test(file: str) -> bool:
    """Return True for files of the tests."""
    return file.startswith("tests/") or (file.startswith("plugins/") and "/tests/" in file)


def is_code(file: str) -> bool:
    """Return True for files that a process may read which runs tfkit outside of the repository."""
    return not is_test(file) and file.startswith(("tfkit/", "plugins/", "specs/", "tools/", "pyproject.toml"))


def digest_of(texts: Iterable[str]) -> str:
    """Return the digest of a list of texts."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:24]


def environment() -> str:
    """Return the digest of what a result depends on besides files."""
    packages = sorted(f"{item.name}=={item.version}" for item in importlib.metadata.distributions())
    programs = [str(shutil.which(name)) for name in ("chromium", "google-chrome", "g++", "git")]
    gpu = str(os.path.exists("/dev/nvidia0"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    settings = json.dumps([project["tool"]["pytest"], project["project"]["entry-points"]], sort_keys=True)
    return digest_of([sys.version, platform.platform(), gpu, settings, *programs, *packages])


# ---- what each test uses ----


class Uses:
    """The uses of the current test; and the uses of functions and modules, for later tests that take their values."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = set(names)
        self.by_path = {PREFIX + name: name for name in self.names}  # without .venv, which is in the repository, too
        self.folders = {parent.as_posix() for name in self.names for parent in Path(name).parents}
        self.current: set[str] = set()
        self.of_code: dict[int, tuple[CodeType, set[str]]] = {}  # by `id`: the hash of code takes as long as a test
        self.of_module: dict[str, set[str]] = defaultdict(set)
        self.caches: dict[int, Any] = {}
        self.scanned: set[str] = set()
        self.scanned_modules = 0
        self.latest: list[tuple[int, int, int | None, int]] = []
        self.handlers: dict[str, Callable[[tuple[Any, ...]], None]] = {
            "open": self.on_open,
            **dict.fromkeys(("os.listdir", "os.scandir"), self.on_listing),
            "subprocess.Popen": lambda arguments: self.on_process(*arguments[:3]),
            **dict.fromkeys(PROCESS_EVENTS, lambda arguments: self.add(CODE)),
        }
        sys.addaudithook(self.on_event)
        _posixsubprocess.fork_exec = self.fork_exec(_posixsubprocess.fork_exec)
        # Not `importlib.import_module` itself: the product reads the source of functions that forwards call.
        importlib._bootstrap._gcd_import = self.gcd_import(importlib._bootstrap._gcd_import)  # type: ignore[attr-defined]

    def fork_exec(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function by which multiprocessing spawns a process, which raises no event."""

        def fork_exec(*arguments: Any) -> Any:
            self.add(CODE)
            return original(*arguments)

        return fork_exec

    def gcd_import(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function behind `importlib.import_module`, whose use of an imported module raises no event."""

        def gcd_import(*arguments: Any) -> Any:
            module = original(*arguments)
            if (name := self.by_path.get(getattr(module, "__file__", None))) is not None:
                self.add(f"module:{name}")
            return module

        return gcd_import

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle an audit event of Python. Most events are attributes of code and frames: a test has thousands."""
        if event in self.handlers:
            self.handlers[event](arguments)

    def on_open(self, arguments: tuple[Any, ...]) -> None:
        """Count a file that is opened to be read."""
        path, mode, flags = arguments
        written = flags & (os.O_WRONLY | os.O_RDWR) if isinstance(flags, int) else mode and not mode.startswith("r")
        if not written and (name := self._name(path)) in self.names and not _by_import():
            self.add(f"file:{name}")

    def on_listing(self, arguments: tuple[Any, ...]) -> None:
        """Count a folder that is listed."""
        if (name := self._name(arguments[0] or ".")) in self.folders:
            self.add(f"folder:{name}")

    def on_process(self, executable: Any, command: Any, folder: Any) -> None:
        """Count what a process may read."""
        words = [os.fsdecode(word) for word in ([command] if isinstance(command, str | bytes) else command)]
        if os.path.basename(words[0]) in HARMLESS:
            return
        self.add(CODE)
        folder = os.path.abspath(os.fsdecode(folder or "."))
        files = re.findall(rf"{re.escape(PREFIX)}([\w./-]+)", "\n".join(words))
        if f"{folder}{os.sep}".startswith(PREFIX) or any(file in self.folders for file in files):
            self.add(ALL_FILES)
        for file in self.names.intersection(files):
            self.add(f"module:{file}" if file.endswith(".py") else f"file:{file}")

    def _name(self, path: Any) -> str | None:
        """Return the name of a path in the repository; None for a path outside of it."""
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str | os.PathLike):
            return None
        text = os.path.abspath(path)
        return text[len(PREFIX) :] if text.startswith(PREFIX) else "." if text == str(ROOT) else None

    def add(self, use: str) -> None:
        """Add a use to the current test, and to all functions and modules of the repository that are running."""
        self.current.add(use)
        frame = sys._getframe(1)
        while frame is not None:
            if (name := self.by_path.get(frame.f_globals.get("__file__"))) is not None:
                code = frame.f_code  # an event: only for frames of the repository
                if code.co_name == "<module>":
                    self.of_module[name].add(use)
                else:
                    self.uses_of(code).add(use)
            frame = frame.f_back

    def uses_of(self, code: CodeType) -> set[str]:
        """Return the uses of a function, to read or to extend."""
        if (entry := self.of_code.get(id(code))) is None:
            entry = self.of_code[id(code)] = code, set()
        return entry[1]

    # Caches: who takes a value uses what was used to compute it.

    def counts(self) -> list[tuple[int, int, int | None, int]]:
        """Return the hits and the misses of each cache, in the order in which the caches were found."""
        self._scan()
        return [cache.cache_info() for cache in self.caches.values()]

    def _scan(self) -> None:
        """Look for caches in modules of the repository that are new: in variables, classes and closures."""
        if len(sys.modules) == self.scanned_modules:
            return
        self.scanned_modules = len(sys.modules)
        for name in [name for name in sys.modules if name not in self.scanned]:
            self.scanned.add(name)
            module = sys.modules[name]
            if getattr(module, "__file__", None) not in self.by_path:
                continue
            for value in [*vars(module).values()]:
                values = [value]
                if issubclass(type(value), type):  # `isinstance` asks proxies for their class
                    values += vars(value).values()
                elif type(value) is FunctionType and value.__closure__:
                    values += [cell.cell_contents for cell in value.__closure__ if _is_set(cell)]
                for cache in values:
                    if type(cache) is _lru_cache_wrapper and type(cache.__wrapped__) is FunctionType:
                        self.caches[id(cache)] = cache

    def taken_since(self, before: list[tuple[int, int, int | None, int]]) -> set[str]:
        """Return the uses of all caches that have had a hit since `before`; caches that missed depend on them, too."""
        now = self.latest = self.counts()
        if now == before:
            return set()
        before = before + [(0, 0, None, 0)] * (len(now) - len(before))
        changes = zip(self.caches, before, now, strict=True)
        changed = [(key, old, new) for key, old, new in changes if old != new]
        uses = {use for key, old, new in changed if new[0] > old[0] for use in self._of_cache(key)}
        for key, old, new in changed:
            if new[1] > old[1]:
                self.uses_of(self.caches[key].__wrapped__.__code__).update(uses)
        return uses

    def _of_cache(self, key: int) -> set[str]:
        return self.uses_of(self.caches[key].__wrapped__.__code__)


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _by_import() -> bool:
    """Return True if the import system opens a file: edges of modules stand for such files."""
    frame = sys._getframe(3)
    return (
        frame.f_code.co_filename.startswith("<frozen importlib")
        or "/_pytest/assertion/rewrite" in frame.f_code.co_filename
    )


# ---- entries ----


def read_entries() -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
    """Return the entries of each test, the latest last, and the lists of uses by their digests."""
    entries: dict[str, list[dict[str, Any]]] = defaultdict(list)
    uses: dict[str, list[str]] = {}
    for path in sorted(FOLDER.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the last line of a process that was killed
            if "test" in entry:
                entries[entry["test"]].append(entry)
            else:
                uses |= entry
    return entries, uses


def known_seconds() -> dict[str, float]:
    """Return the seconds of the latest run of each test."""
    return {test: entries[-1]["seconds"] for test, entries in read_entries()[0].items()}


def compact(count: int = 3) -> None:
    """Merge the files of processes that have ended, and keep the latest entries of each test."""
    ended = [path for path in FOLDER.glob("*.jsonl") if not os.path.exists(f"/proc/{path.stem}")]
    if len(ended) < 2:
        return
    entries, uses = read_entries()
    latest = [entry for values in entries.values() for entry in values[-count:]]
    names = {entry["uses"] for entry in latest}
    lines = [json.dumps({name: uses[name]}) for name in sorted(names & uses.keys())] + [*map(json.dumps, latest)]
    temporary = FOLDER / f"{os.getpid()}.new"
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for path in ended:
        path.unlink()
    temporary.rename(FOLDER / "all.jsonl")


class Recorder:
    """A pytest plugin that writes an entry for each test of this process."""

    def __init__(self, tree: Tree, uses: Uses) -> None:
        self.tree, self.uses = tree, uses
        self.environment = environment()
        uses.latest = uses.counts()
        self.fixtures: list[Any] = []
        self.outcomes: dict[str, str] = {}
        self.pending: list[tuple[frozenset[str], dict[str, Any]]] = []
        self.written: set[str] = set()
        self.dirty: set[str] = set()
        self.closures: dict[frozenset[str], frozenset[str]] = {}
        self.looked = time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        """Count the caches that a file of tests uses while it is imported."""
        if not isinstance(collector, pytest.Module):
            return (yield)
        counts, loaded = self.uses.latest, {*sys.modules}
        result = yield
        counted = self.uses.taken_since(counts)
        files = [getattr(sys.modules[name], "__file__", None) or "" for name in {*sys.modules} - loaded]
        for file in counted and [str(collector.path), *files]:
            if file in self.uses.by_path:
                self.uses.of_module[self.uses.by_path[file]] |= counted
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """Count the caches that a fixture of a wider scope uses, for each test that takes its value."""
        if fixturedef.scope == "function":
            return (yield)
        counts = self.uses.counts()
        result = yield
        if (code := code_of(fixturedef)) is not None and (files := self.uses.taken_since(counts)):
            self.uses.uses_of(code).update(files)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record a test: setup, call and teardown."""
        self.uses.current, self.fixtures = set(), []
        counts, start = self.uses.latest, time.perf_counter()
        result = yield
        seconds = time.perf_counter() - start
        uses = self.uses.current | self.uses.taken_since(counts)
        self.uses.current = set()
        for definition in self.fixtures:
            code = code_of(definition)
            if code is not None and code.co_filename in self.uses.by_path:
                uses.add(f"module:{self.uses.by_path[code.co_filename]}")
                uses |= self.uses.uses_of(code)
        self.record(item, uses, seconds)
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Store the fixtures that a test has used, also those that it asked for while it ran."""
        self.fixtures = [*item._request._fixture_defs.values()] if isinstance(item, pytest.Function) else []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of setup, call and teardown."""
        outcome = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
        order = ("passed", "skipped", "xfailed", "failed")
        self.outcomes[report.nodeid] = max(outcome, self.outcomes.get(report.nodeid, "passed"), key=order.index)

    def record(self, item: pytest.Item, uses: set[str], seconds: float) -> None:
        """Add an entry, and write the entries whose files are unchanged since the first import."""
        file = os.path.relpath(item.path, ROOT)
        uses |= {f"module:{file}", "file:tfkit/pytest_plugin.py"}
        roots = frozenset(use for use in uses if use.startswith("module:"))
        if roots not in self.closures:
            self.closures[roots] = frozenset(module for use in roots for module in self.tree.files_of(use))
        for module in self.uses.of_module.keys() & self.closures[roots]:
            uses |= self.uses.of_module[module]
        outcome = self.outcomes.pop(item.nodeid, "failed")
        self.pending.append(
            (
                frozenset(uses),
                {
                    "test": item.nodeid,
                    "outcome": outcome,
                    "seconds": round(seconds, 3),
                    "environment": self.environment,
                },
            )
        )
        if time.monotonic() - self.looked > INTERVAL:
            self.write()

    def write(self) -> None:
        """Write the pending entries, without those whose files have changed during the run."""
        self.dirty |= self.tree.changed()
        lines = []
        for uses, entry in self.pending:
            if self.dirty and any(not self.dirty.isdisjoint(self.tree.files_of(use)) for use in uses):
                continue
            name = digest_of(sorted(uses))
            if name not in self.written:
                self.written.add(name)
                lines.append(json.dumps({name: sorted(uses)}))
            lines.append(json.dumps({**entry, "uses": name, "digest": self.tree.digest(uses)}))
        if lines:
            FOLDER.mkdir(parents=True, exist_ok=True)
            with open(FOLDER / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
        self.pending.clear()
        self.looked = time.monotonic()

    def pytest_sessionfinish(self) -> None:
        """Write the last entries."""
        self.write()


def code_of(definition: Any) -> CodeType | None:
    """Return the code of a fixture, whose value may serve several tests."""
    return getattr(getattr(definition.func, "__func__", definition.func), "__code__", None)


# ---- pytest ----

COUNTS = pytest.StashKey[dict[str, int]]()
_started: list[tuple[Tree, Uses]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option. pytest calls this hook before anything of tfkit is imported, so the digests are taken here."""
    parser.addoption("--unproved", action="store_true", help="only tests without a green result for the current files")
    if not _started and (ROOT / ".git").exists():
        tree = Tree()
        _started.append((tree, Uses(tree.digests)))


def pytest_configure(config: pytest.Config) -> None:
    """Record in the processes that run tests."""
    if config.getoption("--unproved") and not _started:
        raise pytest.UsageError("--unproved needs a checkout: the ledger asks git for the files")
    if not hasattr(config, "workerinput"):
        compact()
    if _started and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Recorder(*_started[0]), "ledger-recorder")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are proved."""
    if not config.getoption("--unproved"):
        return
    tree = _started[0][0]
    entries, uses = read_entries()
    current = environment()

    def is_green(test: str) -> bool:
        return any(
            entry["environment"] == current and entry["digest"] == tree.digest(uses.get(entry["uses"], ["file:"]))
            for entry in entries.get(test, ())
            if entry["outcome"] in GREEN
        )

    counts = {"all": len(items)}
    proved = [item for item in items if is_green(item.nodeid)]
    config.hook.pytest_deselected(items=proved)
    left = {item.nodeid for item in proved}
    items[:] = [item for item in items if item.nodeid not in left]
    counts["proved"] = len(proved)
    config.stash[COUNTS] = counts
    if hasattr(config, "workeroutput"):
        config.workeroutput["counts"] = counts


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Store the counts of a worker: all workers have the same."""
    node.config.stash[COUNTS] = getattr(node, "workeroutput", {}).get("counts", {})


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let a run pass in which nothing was left to prove."""
    if session.config.getoption("--unproved") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print how many tests are green."""
    counts = config.stash.get(COUNTS, None)
    if counts:
        tests = {
            name: {report.nodeid for report in terminalreporter.stats.get(name, ()) if hasattr(report, "nodeid")}
            for name in (*GREEN, "failed", "error")
        }
        green = set().union(*(tests[name] for name in GREEN)) - tests["failed"] - tests["error"]
        describe = ["git", "describe", "--always", "--dirty=, with uncommitted changes"]
        commit = subprocess.run(describe, cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()
        terminalreporter.write_line(f"{counts['proved'] + len(green)} of {counts['all']} green on {commit}")

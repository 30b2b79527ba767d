"""Plant known bugs in a scratch copy of tfkit, one at a time, and report the quick test that detects each bug.

    python tools/planted.py                      all bugs: first the tests that an entry names, then all quick tests
    python tools/planted.py --only rope          the bugs whose description or file contains `rope`
    python tools/planted.py --since main         the bugs that are new or changed since a commit
    python tools/planted.py --hinted             only the named tests: minutes instead of hours
    python tools/planted.py --at /path/to/tree   another working tree of tfkit, with this list
    python tools/planted.py --check              only whether each bug can still be planted

The list is `tests/planted.yaml`. The working tree itself is never changed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import hypothesis  # noqa: F401  imported once here, so that the forks of all bugs need not import it
import jsonschema  # noqa: F401
import pytest
import torch._dynamo  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
import yaml

ROOT = Path(__file__).parent.parent
BUGS = ROOT / "tests" / "planted.yaml"
CRASHED = 99
TIMED_OUT = 98
ARGUMENTS = [
    *["-x", "-q", "-rfE", "--tb=no", "--color=no", "-p", "no:cacheprovider"],
    *["-W", "ignore::pytest.PytestAssertRewriteWarning"],  # about pytest plugins that transformers has imported
]
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Bug:
    """A change of a single file that at least one quick test must detect."""

    words: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def plant(self, tree: Path) -> str:
        """Write the bug to a tree, and return the old text of the file. Raise ValueError if the bug no longer fits."""
        path = tree / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {text.count(self.old)} times, not once")
        write(path, text.replace(self.old, self.new))
        return text


def write(path: Path, text: str) -> None:
    """Write a module, and remove its compiled code, whose timestamp may equal the timestamp of the new text."""
    path.write_text(text, encoding="utf-8")
    Path(cache_from_source(path)).unlink(missing_ok=True)


def read_bugs(path: Path = BUGS) -> list[Bug]:
    """Read all bugs of the list, in its order."""
    return bugs_in(path.read_text(encoding="utf-8"))


def bugs_of(commit: str) -> list[Bug]:
    """Read all bugs of the list of a commit."""
    command = ["git", "show", f"{commit}:{BUGS.relative_to(ROOT)}"]
    return bugs_in(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def bugs_in(text: str) -> list[Bug]:
    """Return the bugs of a list, in its order."""
    entries = yaml.safe_load(text)
    return [Bug(entry["bug"], entry["file"], entry["old"], entry["new"], tuple(entry["tests"])) for entry in entries]


def copy_of(tree: Path, folder: Path) -> Path:
    """Copy the tracked files of a working tree, and its new files."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, folder / name)
    return folder


def run_pytest(
    tree: Path, arguments: Sequence[str], *, plugins: Sequence[object] = (), seconds: float = math.inf
) -> tuple[int, str]:
    """Run pytest in a tree; return its exit status, TIMED_OUT after `seconds`, and its output.

    pytest runs in a fork of this process, which has imported torch for all bugs, but no module of tfkit.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        child = os.fork()
        if child == 0:
            paths = [str(tree), *map(str, sorted(tree.glob("plugins/*/src")))]
            status = CRASHED
            try:
                os.setsid()  # so that the processes of a test can be killed together
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.chdir(tree)
                os.environ["PYTHONPATH"] = os.pathsep.join(paths)
                sys.path[:0] = paths
                status = int(pytest.main(list(arguments), plugins=list(plugins)))
            finally:  # open files belong to the parent process
                os._exit(status)
        status = wait(child, seconds)
        output.seek(0)
        return status, output.read()


def wait(child: int, seconds: float) -> int:
    """Wait for a session leader. Return its exit status; after the timeout, kill the session and return TIMED_OUT."""
    deadline = time.monotonic() + seconds
    ended = 0
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return TIMED_OUT
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not ended:
            os.waitpid(child, 0)


def first_failure(tree: Path, tests: Sequence[str], workers: int) -> str | None:
    """Return the first of the tests, by default all quick tests, that fails in a tree; None if all pass."""
    status, output = run_pytest(tree, [*ARGUMENTS, *(tests or ["-n", str(workers), "--dist", "worksteal"])])
    return None if status == pytest.ExitCode.OK else failure_in(output, status)


def failure_in(output: str, status: int) -> str:
    """Return the failed test that pytest has printed, or its exit status."""
    failed = FAILED.search(output)
    return failed[1] if failed else f"(pytest ended with {status})"


def detected_by(tree: Path, bug: Bug, *, hinted: bool, workers: int) -> str | None:
    """Return the test that detects a bug in a scratch tree; None if no test does."""
    before = bug.plant(tree)
    try:
        there = [test for test in bug.tests if (tree / test.partition("::")[0]).exists()]
        failure = first_failure(tree, there, workers) if there else None
        return failure if failure or hinted else first_failure(tree, (), workers)
    finally:
        write(tree / bug.file, before)


def check(tree: Path, bugs: Sequence[Bug]) -> int:
    """Print the bugs that no longer fit the code, and return their number."""
    stale = 0
    for bug in bugs:
        text = (tree / bug.file).read_text(encoding="utf-8") if (tree / bug.file).is_file() else ""
        if text.count(bug.old) != 1:
            stale += 1
            print(f"stale: {bug.words}: {bug.file} has {bug.old!r} {text.count(bug.old)} times")
    return stale


def main() -> int:
    """Run the list. Return 0 only if every bug was planted and detected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="WORD", help="only bugs whose words or file contain it")
    parser.add_argument("--since", metavar="COMMIT", help="only bugs that are new or changed since a commit")
    parser.add_argument("--hinted", action="store_true", help="only the tests that an entry names")
    parser.add_argument("--check", action="store_true", help="only whether each bug can still be planted")
    parser.add_argument("--at", type=Path, default=ROOT, help="the working tree that is copied")
    parser.add_argument("--workers", type=int, default=2, help="for the runs of all quick tests")
    options = parser.parse_args()
    bugs = [bug for bug in read_bugs() if not options.only or options.only in f"{bug.words} {bug.file}"]
    if options.since:
        earlier = bugs_of(options.since)
        bugs = [bug for bug in bugs if bug not in earlier]
    if not options.at.is_dir():
        parser.error(f"--at {options.at}: there is no such folder")
    if not bugs:
        parser.error("there is no such bug: use another --only or --since")
    if options.check:
        return int(check(options.at, bugs) > 0)
    caught: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = copy_of(options.at.resolve(), Path(folder))
        for number, bug in enumerate(bugs, 1):
            try:
                test = detected_by(tree, bug, hinted=options.hinted, workers=options.workers)
            except ValueError as stale:
                test, verdict = str(stale), "stale"
            else:
                verdict = "caught" if test else "MISSED"
                caught |= {bug.words: test} if test else {}
            print(f"{number:3} {verdict}  {bug.words}\n           {test or '-'}", flush=True)
        # Without parameters, whose names may contain numbers that a bug changes.
        tests = sorted({test.partition("[")[0] for test in caught.values() if not test.startswith("(")})
        red = first_failure(tree, tests, 1) if tests else None
    print(f"\n{len(caught)} of {len(bugs)} caught" + (f"; but {red} is red without a bug" if red else ""))
    return int(len(caught) < len(bugs) or red is not None)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")

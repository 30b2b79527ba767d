"""Interleaved measurements in fresh processes: CPU time, because the clock on the wall also measures the neighbours."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 80


@dataclass
class Contender:
    """A process to measure: a command, and what each of its runs gave (`cpu`, `rss`, and what it printed)."""

    name: str
    command: Sequence[str]
    runs: list[dict[str, float]] = field(default_factory=list)

    def values(self, key: str) -> list[float]:
        """One figure of every run, in the order of the rounds."""
        return [run[key] for run in self.runs]


@dataclass(frozen=True)
class Ratio:
    """A figure of one contender over that of another, paired by round."""

    median: float
    low: float
    high: float
    of_minima: float

    def __str__(self) -> str:
        return f"{self.of_minima:.2f}  ({self.low:.2f} to {self.high:.2f})"


def script(source: str, python: str = sys.executable) -> list[str]:
    """The command that runs a piece of Python."""
    return [python, "-c", source]


def race(contenders: Sequence[Contender], rounds: int, timeout: float = 300) -> None:
    """Run all contenders once each round, one after the other; a round that does not count comes first."""
    for number in range(rounds + 1):
        for one in contenders:
            run = run_once(one.command, timeout)
            if number:
                one.runs.append(run)


def run_once(command: Sequence[str], timeout: float = 300) -> dict[str, float]:
    """CPU seconds and peak memory in MB of a process, and the numbers in the JSON that it may print last.

    Raises `RuntimeError` with the end of what the process said when it fails.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment(), cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        printed, complaint = out.read().decode(), err.read().decode()
    if process.returncode:
        raise RuntimeError(complaint.strip().rpartition("\n")[2] or f"exit status {process.returncode}")
    unit = 2**20 if sys.platform == "darwin" else 2**10
    figures = {"cpu": usage.ru_utime + usage.ru_stime, "rss": usage.ru_maxrss / unit}
    last = printed.strip().rpartition("\n")[2]
    return figures | (json.loads(last) if last.startswith("{") else {})


def environment() -> Mapping[str, str]:
    """One thread, this checkout first, bytecode cached as after an installation, and no hub."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Paired ratios: their median, lowest and highest, and the ratio of the two minima."""
    paired = [a / b for a, b in zip(above, below, strict=True)]
    return Ratio(statistics.median(paired), min(paired), max(paired), min(above) / min(below))


def compare(contenders: Sequence[Contender], key: str) -> str:
    """A table of one figure: the first contender is held against each of the others."""
    first = contenders[0]
    lines = [f"  {'':26}{'min':>8}{'median':>9}   first / this: minima (by round)"]
    for one in contenders:
        values = one.values(key)
        held = "" if one is first else str(ratio(first.values(key), values))
        lines.append(f"  {one.name:26}{min(values):>8.3f}{statistics.median(values):>9.3f}   {held}".rstrip())
    return "\n".join(lines)


def version(package: str, python: str = sys.executable) -> str:
    """The installed version of a package as that interpreter sees it; empty where there is none."""
    source = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", source], capture_output=True, text=True, check=False).stdout.strip()


def machine() -> str:
    """What it was measured on, in one line: cores, memory, processor, system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    model = "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{os.cpu_count()} cores ({model}, {os.uname().machine}), {memory:.0f} GiB, {os.uname().sysname}"

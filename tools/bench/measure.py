"""Interleaved measurements of CPU time, because other processes affect wall-clock time; on a GPU, of its clock.

Contenders are fresh processes (`race`), or functions that return their own time (`take_turns`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 80


@dataclass
class Contender:
    """A process to measure: a command, and the results of each run (`cpu`, `rss`, and its printed figures)."""

    name: str
    command: Sequence[str]
    runs: list[dict[str, float]] = field(default_factory=list)
    root: Path = ROOT
    """The checkout that the process imports."""

    def values(self, key: str) -> list[float]:
        """Return a figure of every run, in the order of the rounds."""
        return [run[key] for run in self.runs]


@dataclass(frozen=True)
class Ratio:
    """The ratio of a figure between two contenders, paired by round."""

    median: float
    low: float
    high: float
    of_minima: float
    quartiles: tuple[float, float]
    """The first and third quartiles of the ratios."""

    def __str__(self) -> str:
        return f"{self.of_minima:.2f}  ({self.low:.2f} to {self.high:.2f})"


def script(source: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs Python code."""
    return [python, "-c", source]


def race(contenders: Sequence[Contender], rounds: int, timeout: float = 300) -> None:
    """Run every contender once in each round. The first round is a warm-up, and does not count."""
    for number in range(rounds + 1):
        for contender in contenders:
            run = run_once(contender.command, timeout, contender.root)
            if number:
                contender.runs.append(run)


def run_once(command: Sequence[str], timeout: float = 300, root: Path = ROOT) -> dict[str, float]:
    """Return CPU seconds and peak memory in MB of a process, and the numbers in the JSON on its last line, if any.

    Raise `RuntimeError` with the last messages of the process if it fails.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment(root), cwd=root)
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


def environment(root: Path = ROOT) -> Mapping[str, str]:
    """Return the environment of a process: one thread, the checkout first in the path, cached bytecode, no Hub."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return the median, spread and quartiles of paired ratios, and the ratio of the two minima."""
    paired = [a / b for a, b in zip(above, below, strict=True)]
    lower, _, upper = statistics.quantiles(paired, n=4, method="inclusive") if len(paired) > 1 else paired * 3
    return Ratio(statistics.median(paired), min(paired), max(paired), min(above) / min(below), (lower, upper))


def seconds(run: Callable[[], object], device: str = "cpu") -> float:
    """Measure one call: CPU time of this process, all threads; on a GPU the time between two of its events."""
    if device == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    import torch

    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1000


def per_token(run: Callable[[int], object], n: int, device: str) -> Callable[[], float]:
    """Measure seconds per token: the time of `n` + 1 tokens minus the time of the first, which includes the prompt."""

    def measure() -> float:
        import torch

        with torch.inference_mode():
            return (seconds(lambda: run(n + 1), device) - seconds(lambda: run(1), device)) / n

    return measure


def take_turns(contenders: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Return the results of each contender in each round, by name.

    The order changes, so that each contender is equally often the first and the last of a round. The first `warm_up`
    rounds do not count.
    """
    names = list(contenders)
    results: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        first = number % len(names)
        order = names[first:] + names[:first]
        for name in reversed(order) if number % 2 else order:
            figure = contenders[name]()
            if number >= 0:
                results[name].append(figure)
    return results


def compare_speeds(times: Mapping[str, Sequence[float]]) -> str:
    """Format a table in milliseconds: the speed of the first contender relative to each of the others.

    `best` is the ratio of the two minima, `median` and `spread` describe single rounds.
    """
    first, ours = next(iter(times.items()))
    lines = [f"  {'ms':20}{'best':>9}{'median':>9}   speed of {first} relative to this: best, median (spread)"]
    for name, values in times.items():
        line = f"  {name:20}{min(values) * 1000:>9.1f}{statistics.median(values) * 1000:>9.1f}"
        if name != first:
            result = ratio(values, ours)
            line += f"   {result.of_minima:.3f}, {result.median:.3f} ({result.low:.2f} to {result.high:.2f})"
        lines.append(line)
    return "\n".join(lines)


def compare(contenders: Sequence[Contender], key: str) -> str:
    """Format a table of a figure: the first contender compared with each of the others."""
    first = contenders[0]
    lines = [f"  {'':26}{'min':>8}{'median':>9}   first / this: minima (by round)"]
    for contender in contenders:
        values = contender.values(key)
        result = "" if contender is first else str(ratio(first.values(key), values))
        lines.append(f"  {contender.name:26}{min(values):>8.3f}{statistics.median(values):>9.3f}   {result}".rstrip())
    return "\n".join(lines)


def version(package: str, python: str = sys.executable) -> str:
    """Return the version of a package in the environment of an interpreter; empty if it is not installed."""
    source = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", source], capture_output=True, text=True, check=False).stdout.strip()


def accelerator() -> str | None:
    """Return the name of the CUDA device; None if there is no device."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def machine() -> str:
    """Describe the machine on one line: cores, memory, processor, system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    model = "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{os.cpu_count()} cores ({model}, {os.uname().machine}), {memory:.0f} GiB, {os.uname().sysname}"

"""The circumstances of a run: what decides its last digits, and what a reader may want to know."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy
import torch

from tfkit.plugin.discover import BUILT_IN, own_version
from tfkit.plugin.manager import Plugins
from tfkit.run.checked_run import Run


def bits_of(run: Run, processes: int) -> dict[str, str | int | bool | None]:
    """Return the values, other than the meaning, on which the last digits of a run depend.

    Equal values guarantee equal bits.
    """
    machine = run.config.machine
    return {
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "device": _device(machine.device),
        "threads": machine.threads,
        "micro_batch": machine.micro_batch,
        "compile": machine.compile,
        "processes": processes,
        "shard": machine.shard,
    }


def environment(plugins: Plugins) -> dict[str, Any]:
    """Return the versions in use, and the commit of the current folder."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "tfkit": own_version(),
        "plugins": {plugin.name: plugin.version for plugin in plugins.loaded if plugin.origin != BUILT_IN},
        "git": _commit(Path()),
    }


def _device(name: str) -> str:
    if name.startswith("cuda"):
        try:
            return torch.cuda.get_device_name(name)
        except (AssertionError, RuntimeError):  # there is none: the trainer says so
            return name
    return f"{name}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _commit(folder: Path) -> str | None:
    """Return the commit of a folder, with `+changes` if files differ from it; None outside of git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()

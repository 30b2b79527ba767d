"""The processor time of a command, beside that of `import torch`: the machine's load changes it little."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

CHILD = """\
import os, subprocess, sys
subprocess.run(sys.argv[1:], check=True, capture_output=True)
used = os.times()
print(used.children_user + used.children_system)
"""
TORCH = [sys.executable, "-c", "import torch"]


def times_torch(command: Sequence[str]) -> float:
    """The time of a command in times of `import torch`, the best of two each."""
    own, torch = zip(*((_seconds(command), _seconds(TORCH)) for _ in range(2)), strict=True)
    return min(own) / min(torch)


def _seconds(command: Sequence[str]) -> float:
    done = subprocess.run([sys.executable, "-c", CHILD, *command], capture_output=True, text=True, check=True)
    return float(done.stdout)

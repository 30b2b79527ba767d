"""CPU time of a command, relative to the import of its libraries.

The load of the machine changes the ratio little.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CHILD = """\
import os, subprocess, sys
subprocess.run(sys.argv[1:], check=True, capture_output=True)
used = os.times()
print(used.children_user + used.children_system)
"""


def times_libraries(command: Sequence[str], folder: Path, libraries: str = "torch") -> float:
    """Return the time of a command divided by the time of `import <libraries>`, the best of two each.

    Bytecode is written to `folder`: users have it, but a test environment may not write it.
    """
    imports = [sys.executable, "-c", f"import {libraries}"]
    times = [(_seconds(command, folder), _seconds(imports, folder)) for _ in range(3)][1:]  # the first writes bytecode
    used, imported = zip(*times, strict=True)
    return min(used) / min(imported)


def _seconds(command: Sequence[str], folder: Path) -> float:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder)
    child = [sys.executable, "-c", CHILD, *command]
    return float(subprocess.run(child, capture_output=True, text=True, check=True, env=environment).stdout)

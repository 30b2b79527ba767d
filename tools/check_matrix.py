"""Plant each bug of `tests/tools/check/planted`, measure every property, and write the table of docs/check_bugs.md.

python tools/check_matrix.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.tools.check.models import PROPERTIES, subject  # noqa: E402
from tests.tools.check.planted import BUGS, Bug  # noqa: E402
from tfkit.tools.check.check import outcomes_of  # noqa: E402
from tools.pages import write_table  # noqa: E402

PAGE = ROOT / "docs" / "check_bugs.md"
HEAD = "| bug | in | breaks |\n|---|---|---|\n"


def broken(bug: Bug) -> list[str]:
    """Return the properties that a bug breaks, starting with the property for which it was planted."""
    checked, patches = subject(bug.model), [patch.object(*arguments) for arguments in bug.patches]
    for patcher in patches:
        patcher.start()
    try:
        slow = {prop.name for prop in PROPERTIES.properties if prop.level == "full"} - {bug.red} | {"script"}
        properties = [prop for prop in PROPERTIES.properties if prop.of == "model" and prop.name not in slow]
        results = [next(outcomes_of(checked, [prop])) for prop in properties]
    finally:
        for patcher in patches:
            patcher.stop()
    names = [result.name for result in results if result.status == "failed"]
    return sorted(names, key=lambda name: name != bug.red)


def row(bug: Bug) -> str:
    """Format a line of the table."""
    where = bug.where
    if "#" in where:
        repository, _, number = where.partition("#")
        where = f"[{where}](https://github.com/{repository}/issues/{number})"
    return f"| {bug.bug} | {where} | {', '.join(f'`{name}`' for name in broken(bug))} |\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = []
    for bug in BUGS:
        rows.append(row(bug))
        print(rows[-1], end="", flush=True)
    write_table(PAGE, "bugs", HEAD + "".join(rows))

"""Options, tables, files and HTML pages: what commands of tfkit and of plugins use.

The names are listed in `commands.pyi`, and on the page `docs/commands.md`. Each is imported when it is first used.
"""

from __future__ import annotations

import os

from tfkit import _attribute, _homes

_STUB = f"{os.path.splitext(__file__)[0]}.pyi"


def __getattr__(name: str) -> object:
    return _attribute(__name__, _STUB, name)


def __dir__() -> list[str]:
    return sorted(_homes(_STUB))

"""The pattern of a stack's layers in the text of a spec."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

BASE = "base"


def pattern_of(names: Sequence[str]) -> Any:
    """Return the shortest text that arranges layers in this way: a cycle with counts, or ranges and the rest."""
    n = len(names)
    length = next(k for k in range(1, n + 1) if all(names[i] == names[i % k] for i in range(n)))
    runs = [(name, len(list(run))) for name, run in groupby(names[:length])]
    if length == n and len(runs) == 2:
        (first, count), (rest, _) = runs
        return {"0" if count == 1 else f"0-{count - 1}": first, "rest": rest}
    return [name if times == 1 else f"{name}*{times}" for name, times in runs]

"""Shipped specs at a reduced size, also those whose layers follow a pattern."""

from __future__ import annotations

import re
from collections.abc import Iterator

import tfkit

from ...shipped import reductions


def reduced(name: str) -> tfkit.Graph:
    """A shipped spec, tiny, with as many layers as its pattern needs."""
    sets = [*reductions(tfkit.load(name))]
    for _ in range(4):
        try:
            return tfkit.load(name, sets=sets)
        except tfkit.SpecError as wrong:
            sets += [change for one in wrong.diagnostics for change in _changes(one.message, one.path)]
    return tfkit.load(name, sets=sets)


def _changes(message: str, path: str) -> Iterator[str]:
    """What the error asks for."""
    node = path.removeprefix("graph.").partition(".")[0]
    if match := re.search(r"the pattern has (\d+) layers|there is no layer (\d+)", message):
        yield f"{node}.n_layers={match[1] or int(match[2]) + 2}"
    elif match := re.search(r"(\w+)_factor has \d+ factors, and (\d+) pairs", message):
        scaling = path.rpartition(".")[0]
        yield from (f"{scaling}.{kind}_factor={[1.5] * int(match[2])}" for kind in ("short", "long"))

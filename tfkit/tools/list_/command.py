"""List the specs of tfkit and of plugins, and the runs and sweeps of tfkit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import command
from tfkit.console.options import json_option
from tfkit.console.output import print_json, show, table
from tfkit.console.reader import Reader
from tfkit.tools.common.units import short

if TYPE_CHECKING:
    from tfkit.plugin.manager import Available
    from tfkit.tools.list_.gallery import Shipped

NAME = re.compile(r"[^\w.-]")
"""The end of a plugin's name in `requires`."""


@command(
    "list",
    sets=False,
    notes="""
    Only specs with all WORDs in their name, kind, model family, plugins, or
    description are listed. Missing plugins of a spec are named; none is loaded.
    Runs and sweeps, which follow the specs, have `run` or `sweep` as their kind.
    """,
    examples="""
    tfkit list
    tfkit list encoder bert
    tfkit list sweep
    """,
)
@click.argument("words", nargs=-1, metavar="[WORD]...")
@json_option
def list_(reader: Reader, words: tuple[str, ...], json: bool) -> None:
    from tfkit.tools.list_.gallery import experiments, shipped

    specs, others = shipped(words, reader.available), experiments(words)
    if json:
        print_json([*specs, *others])
        return
    if specs or not others:
        _show_specs(specs)
    for sort, action in ("run", "train"), ("sweep", "sweep"):
        rows = [(one.name, one.description or "") for one in others if one.sort == sort]
        if rows:
            show(table([f"tfkit {action}", "description"], rows), "")
    counts = [(len(specs), "spec"), *((sum(one.sort == sort for one in others), sort) for sort in ("run", "sweep"))]
    texts = [f"{count} {sort}{'s' if count != 1 else ''}" for count, sort in counts if count]
    show(", ".join(texts) or "0 specs", *_missing(specs, reader.available))


def _show_specs(specs: Sequence[Shipped]) -> None:
    columns = ["name", "kind", "size", "description"]
    kinds = {"encoder-decoder": "enc-dec"}
    rows = [
        (one.name, kinds.get(one.kind, one.kind), short(one.parameters) if one.parameters else "", _special(one))
        for one in specs
    ]
    show(table(columns, rows, right=["size"]), "")


def _special(one: Shipped) -> str:
    from tfkit.plugin.discover import BUILT_IN

    needs = f"needs {', '.join(one.missing)}" if one.missing else ""
    origin = f"from {one.plugin}" if one.plugin not in (BUILT_IN, *one.missing) else ""
    return "; ".join(filter(None, (one.description, one.error, origin, needs)))


def _missing(specs: Sequence[Shipped], there: Available) -> Iterator[str]:
    """The way to get the plugins that some of the specs need."""
    from tfkit.plugin.discover import canonical
    from tfkit.plugin.wanted import where_it_is
    from tfkit.spec.find import plugin_folders

    for text in sorted({text for one in specs for text in one.missing}):
        count, name = sum(text in one.missing for one in specs), NAME.split(text)[0]
        if canonical(name) in there.versions:
            yield f"\n{text}, needed by {count}, is another version than {there.versions[canonical(name)] or 'none'}"
        else:
            help = where_it_is(name, plugin_folders(), there.specs.disabled)
            yield f"\n{text}, needed by {count}, is not loaded: {help}"

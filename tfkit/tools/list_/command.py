"""List the specs of tfkit and of plugins, and the runs and sweeps of tfkit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import Reader, command
from tfkit.console.options import json_option
from tfkit.console.output import print_json, print_tables, table
from tfkit.tools.common.units import count_text

if TYPE_CHECKING:
    from tfkit.plugin.manager import Available
    from tfkit.tools.list_.gallery import Shipped

NAME = re.compile(r"[^\w.-]")
"""Matches the first character after the name of a plugin in `requires`."""


@command(
    "list",
    section="Specs",
    order=510,
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

    specs, entries = shipped(words, reader.available), experiments(words)
    if json:
        print_json([*specs, *entries])
        return
    if specs or not entries:
        _show_specs(specs)
    for sort, action in ("run", "train"), ("sweep", "sweep"):
        rows = [(entry.name, entry.description or "") for entry in entries if entry.sort == sort]
        if rows:
            print_tables(table([f"tfkit {action}", "description"], rows), "")
    counts = [
        (len(specs), "spec"),
        *((sum(entry.sort == sort for entry in entries), sort) for sort in ("run", "sweep")),
    ]
    texts = [f"{count} {sort}{'s' if count != 1 else ''}" for count, sort in counts if count]
    print_tables(", ".join(texts) or "0 specs", *_missing(specs, reader.available))


def _show_specs(specs: Sequence[Shipped]) -> None:
    columns = ["name", "kind", "size", "description"]
    kinds = {"encoder-decoder": "enc-dec"}
    rows = [
        (
            spec.name,
            kinds.get(spec.kind, spec.kind),
            count_text(spec.parameters) if spec.parameters else "",
            _special(spec),
        )
        for spec in specs
    ]
    print_tables(table(columns, rows, right=["size"]), "")


def _special(spec: Shipped) -> str:
    from tfkit.plugin.discover import BUILT_IN

    needs = f"needs {', '.join(spec.missing)}" if spec.missing else ""
    origin = f"from {spec.plugin}" if spec.plugin not in (BUILT_IN, *spec.missing) else ""
    return "; ".join(filter(None, (spec.description, spec.error, origin, needs)))


def _missing(specs: Sequence[Shipped], installed: Available) -> Iterator[str]:
    """Yield how to install the plugins that some of the specs need."""
    from tfkit.plugin.discover import canonical
    from tfkit.plugin.missing import where_it_is
    from tfkit.spec.extending import plugin_folders

    for text in sorted({text for spec in specs for text in spec.missing}):
        count, name = sum(text in spec.missing for spec in specs), NAME.split(text)[0]
        if canonical(name) in installed.versions:
            version = installed.versions[canonical(name)] or "none"
            yield f"\n{text}, needed by {count}, is another version than {version}"
        else:
            help = where_it_is(name, plugin_folders())
            yield f"\n{text}, needed by {count}, is not loaded: {help}"

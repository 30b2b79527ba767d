"""List the specs of tfkit and of plugins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import command
from tfkit.console.options import Reader, json_option
from tfkit.plugin.discover import BUILT_IN

if TYPE_CHECKING:
    from tfkit.tools.list_.gallery import Shipped


@command(
    "list",
    sets=False,
    notes="""
    Only specs with all WORDs in their name, kind, model family, plugins, or
    description are listed. Missing plugins of a spec are named; none is loaded.
    """,
    examples="""
    tfkit list
    tfkit list encoder bert
    """,
)
@click.argument("words", nargs=-1, metavar="[WORD]...")
@json_option
def list_(reader: Reader, words: tuple[str, ...], json: bool) -> None:
    from tfkit.console.output import print_json, show, table
    from tfkit.tools.common.units import short
    from tfkit.tools.list_.gallery import shipped

    specs = shipped(words, reader.available)
    if json:
        print_json(specs)
        return
    columns = ["name", "kind", "size", "description"]
    kinds = {"encoder-decoder": "enc-dec"}
    rows = [
        (one.name, kinds.get(one.kind, one.kind), short(one.parameters) if one.parameters else "", _special(one))
        for one in specs
    ]
    missing = _missing(specs, reader.available.specs.disabled)
    show(table(columns, rows, right=["size"]), "", f"{len(specs)} specs", *missing)


def _special(one: Shipped) -> str:
    needs = f"needs {', '.join(one.missing)}" if one.missing else ""
    origin = f"from {one.plugin}" if one.plugin not in (BUILT_IN, *one.missing) else ""
    return "; ".join(filter(None, (one.description, one.error, origin, needs)))


def _missing(specs: Sequence[Shipped], disabled: Sequence[str]) -> Iterator[str]:
    """The way to get the plugins that some of the specs need."""
    from tfkit.plugin.wanted import where_it_is
    from tfkit.spec.load import plugin_folders

    for name in sorted({name for one in specs for name in one.missing}):
        count = sum(name in one.missing for one in specs)
        yield f"\n{name}, needed by {count}, is not loaded: {where_it_is(name, plugin_folders(), disabled)}"

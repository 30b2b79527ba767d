"""Show the differences between two specs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from tfkit.console.commands import command
from tfkit.console.options import Reader, json_option


@command(
    "diff",
    notes="""
    A value that several components inherit is one line, and `name`, `source` and
    `description` are left out. The exit status is 0 whether they differ or not.
    """,
    examples="""
    tfkit diff gpt2 gpt2_medium
    tfkit diff llama2_70b llama3_70b --json
    """,
)
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@json_option
def diff(reader: Reader, before: str, after: str, json: bool) -> None:
    from tfkit.console.output import print_json, retitled

    a, b = retitled([reader.load(before), reader.load(after)], (before, after))
    from tfkit.tools.diff.differences import differences
    from tfkit.tools.params.count import count_params

    found, counts = differences(a, b), [count_params(graph).total for graph in (a, b)]
    if json:
        print_json({"a": a.name, "b": b.name, "differences": found, "parameters": counts})
    else:
        _show_differences(found, (a.name, b.name), counts)


def _show_differences(found: Sequence[Any], names: Sequence[str], counts: Sequence[int]) -> None:
    from tfkit.console.output import show, table

    rows = [[_places(one), _or_dash(one.before), _or_dash(one.after)] for one in found]
    if not rows:
        show("no value differs", "")
    rows.append(["parameters", *(f"{count:,}" for count in counts)])
    show(table(["value", *names], rows, footer=1))


def _places(one: Any) -> str:
    return one.path if len(one.places) == 1 else f"{one.path} ({len(one.places)} places)"


def _or_dash(text: str | None) -> str:
    return "-" if text is None else text

"""The results of a sweep in a terminal."""

from __future__ import annotations

import click

from tfkit.console.output import show, table
from tfkit.tools.sweep import tables
from tfkit.tools.sweep.result import Results

WIDEST = 12
"""Characters of a line in the head of a table: with more, the row would have no room on a narrow terminal."""
FORMS = {"markdown": tables.markdown, "latex": tables.latex}


def show_results(found: Results, form: str | None) -> None:
    """Print tables and remarks; in a form for papers, the remarks go to standard error."""
    if form is not None:
        click.echo(FORMS[form](found))
        for note in found.notes:
            click.echo(note, err=True)
        return
    for head, rows in tables.tables(found):
        lines = [_in_lines(one) for one in head]
        show(table(lines, rows, right=lines[1:]), "")
    if found.notes:
        show(*found.notes)


def _in_lines(name: str) -> str:
    """`test.exact_match` in two lines; names of numbers are broken at points, then at underscores, if they are wide."""
    if len(name) <= WIDEST:
        return name
    parts = [part if len(part) <= WIDEST else part.replace("_", "_\n") for part in name.split(".")]
    return ".\n".join(parts)

"""The results of a sweep in a terminal."""

from __future__ import annotations

import click

from tfkit.console.output import show, table
from tfkit.tools.sweep import tables
from tfkit.tools.sweep.result import Results

FORMS = {"markdown": tables.markdown, "latex": tables.latex}


def show_results(found: Results, form: str | None) -> None:
    """Print tables and remarks; in a form for papers, the remarks go to standard error."""
    if form is not None:
        click.echo(FORMS[form](found))
        for note in found.notes:
            click.echo(note, err=True)
        return
    for head, rows in tables.tables(found):
        show(table(head, rows, right=head[1:]), "")
    if found.notes:
        show(*found.notes)

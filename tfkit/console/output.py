"""The output of results: tables of 80 columns, JSON, and progress messages."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tfkit.errors import number_ranges

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from tfkit.graph.expand import Graph

TABLE_WIDTH = 80
"""Number of columns of a table, at most."""
RULES = "    \n    \n ── \n    \n ── \n    \n    \n    \n"  # lines below the header and between sections
PATIENCE = 2.0  # seconds before the message of a stage appears
LAYER = re.compile(r"\blayers\.(\d+)")
T = TypeVar("T")


def print_json(data: Any) -> None:
    """Print data, including dataclasses, as one JSON document."""
    text = json.dumps(data, indent=2, default=dataclasses.asdict, ensure_ascii=False)
    click.echo(text.encode(errors="backslashreplace").decode())  # file names may contain invalid Unicode


def console(*, stderr: bool = False) -> Console:
    """Return a console at most 80 columns wide, without colour outside a terminal or with NO_COLOR."""
    from rich.console import Console

    width = min(TABLE_WIDTH, shutil.get_terminal_size((TABLE_WIDTH, 24)).columns)
    plain = {"color_system": None} if os.environ.get("NO_COLOR") else {}
    return Console(width=width, stderr=stderr, highlight=False, markup=False, emoji=False, **plain)  # type: ignore[arg-type]


def print_tables(*parts: RenderableType) -> None:
    """Print tables and texts, without trailing spaces."""
    out = console()
    with out.capture() as capture:
        for part in parts:
            out.print(part)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()), color=out.is_terminal)


@contextmanager
def warnings_as_text(*categories: type[Warning]) -> Iterator[None]:
    """Print warnings of these classes as text for the user instead of Python's format, at the end of the context."""
    with warnings.catch_warnings(record=True) as caught:
        for category in categories:
            warnings.simplefilter("always", category)
        yield
    for warning in caught:
        if issubclass(warning.category, categories):
            click.echo(f"warning: {warning.message}", err=True)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[str] = (), footer: int = 0
) -> Table:
    """Build a table with a rule below its header, and a rule above its last `footer` rows."""
    from rich.box import Box
    from rich.table import Table

    result = Table(box=Box(RULES), show_edge=False, pad_edge=False, header_style="bold")
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", overflow="fold")
    all_rows = list(rows)
    for index, row in enumerate(all_rows):
        result.add_row(*row, end_section=footer > 0 and index == len(all_rows) - footer - 1)
    return result


def titles(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the titles of models side by side: their names; or the arguments, if different models share a name."""
    pairs = list(zip(names, arguments, strict=True))
    return [
        argument if len({pair_argument for other, pair_argument in pairs if other == name}) > 1 else name
        for name, argument in pairs
    ]


def with_titles(graphs: Sequence[Graph], arguments: Sequence[str]) -> list[Graph]:
    """Return the graphs with their `titles` as names, for tools that show several models side by side."""
    names = titles([graph.name for graph in graphs], arguments)
    return [
        graph if graph.name == name else dataclasses.replace(graph, spec=graph.spec.named(name))
        for graph, name in zip(graphs, names, strict=True)
    ]


def percent(part: int, total: int) -> str:
    """Format a fraction: `68.3%`."""
    return f"{100 * part / total:.1f}%" if total else "-"


def merge_rows(lists: Sequence[Sequence[str]]) -> list[str]:
    """Merge the row names of several tables. Each name follows its predecessor in its table."""
    rows: list[str] = []
    for labels in lists:
        for index, label in enumerate(labels):
            if label not in rows:
                rows.insert(rows.index(labels[index - 1]) + 1 if index else 0, label)
    return rows


def group_layers(rows: Iterable[tuple[str, Hashable, T]]) -> Iterator[tuple[str, list[T]]]:
    """Group rows with equal contents whose labels differ only in the layer, under a label such as `layers.0-11`.

    A row is a tuple of a label, its contents, and an item.
    """
    groups: dict[tuple[str, Hashable], list[tuple[str, T]]] = {}
    for label, contents, item in rows:
        groups.setdefault((LAYER.sub("layers.*", label), contents), []).append((label, item))
    for (label, _), members in groups.items():
        numbers = [int(match[1]) for member, _ in members if (match := LAYER.search(member))]
        yield (
            label.replace("*", number_ranges(numbers).replace(" ", "")) if numbers else label,
            [item for _, item in members],
        )


class Stages:
    """Shows the current stage, on a terminal, if it takes more than two seconds."""

    def __init__(self) -> None:
        self._text = ""
        self._status: Any = None
        self._timer: threading.Timer | None = None

    def __call__(self, text: str) -> None:
        """Begin the next stage."""
        self._text = text
        if self._status is not None:
            self._status.update(f"{text} ...")
        elif self._timer is None:
            self._timer = threading.Timer(PATIENCE, self._appear)
            self._timer.daemon = True
            self._timer.start()

    def _appear(self) -> None:
        self._status = console(stderr=True).status(f"{self._text} ...")
        self._status.start()

    def stop(self) -> None:
        """End the last stage: remove the line."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._status is not None:
            self._status.stop()


@contextmanager
def stages() -> Iterator[Any]:
    """Provide a function to call with the name of each stage; silent if standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    bar = Stages()
    try:
        yield bar
    finally:
        bar.stop()


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Provide a function that draws a progress bar on a terminal from the steps done, all steps, and their noun."""
    if not sys.stderr.isatty():
        yield lambda done, of, words: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn()
    with Progress(*columns, TimeRemainingColumn(compact=True), console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, of, words: bar.update(task, completed=done, total=of, description=words)

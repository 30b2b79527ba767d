"""A table of rows as HTML, for notebooks: no colours of its own, so that it follows their theme."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a title; numbers stand on the right of all columns but the first."""
    head, *body = (_row(cells, "th" if index == 0 else "td") for index, cells in enumerate((columns, *rows)))
    return f"<table><caption>{escape(title)}</caption><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"


def _row(cells: Sequence[str], tag: str) -> str:
    aligned = ["left"] + ["right"] * (len(cells) - 1)
    parts = [
        f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>' for cell, side in zip(cells, aligned, strict=True)
    ]
    return f"<tr>{''.join(parts)}</tr>"

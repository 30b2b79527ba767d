"""A table of rows as HTML, for notebooks: without colours, so that it follows their theme."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, tostring

from tfkit.tools.common.page import tag


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Build a table with a title; columns are right-aligned except the first."""
    body = tag("tbody", *(_row("td", cells) for cells in rows))
    element = tag("table", tag("caption", title), tag("thead", _row("th", columns)), body)
    return tostring(element, encoding="unicode", method="html")


def _row(name: str, cells: Sequence[str]) -> Element:
    return tag("tr", *(tag(name, cell, style=f"text-align:{'right' if i else 'left'}") for i, cell in enumerate(cells)))

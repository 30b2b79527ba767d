"""Graphs, pictures and tables in a notebook: through IPython's formatters where it is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

import tfkit
from tfkit.tools.common.pages import notebook_table

METHODS = {"image/svg+xml": "_repr_svg_", "text/html": "_repr_html_"}


def representations(value: object) -> Mapping[str, str]:
    """The forms that a notebook stores of a value, by their type."""
    try:
        from IPython.core.formatters import DisplayFormatter
    except ImportError:
        actual = {kind: getattr(value, name)() for kind, name in METHODS.items() if hasattr(type(value), name)}
        return {"text/plain": repr(value)} | {kind: text for kind, text in actual.items() if text is not None}
    return DisplayFormatter().format(value)[0]


class Cells(HTMLParser):
    """The texts of a table's cells, row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        if self.rows:
            self.rows[-1].append(data)


def test_a_graph_is_its_picture(small: tfkit.Graph) -> None:
    actual = representations(small)
    assert sorted(actual) == ["image/svg+xml", "text/plain"]
    assert actual == {**representations(tfkit.draw(small)), "text/plain": "<Graph small: embedding, decoder, logits>"}
    root = ET.fromstring(actual["image/svg+xml"])
    assert "small" in str(root[0].text)
    assert "prefers-color-scheme:dark" in actual["image/svg+xml"]


def test_the_text_of_a_picture_is_short(small: tfkit.Graph) -> None:
    assert len(representations(tfkit.draw(small))["text/plain"]) < 400


def test_a_graph_that_cannot_be_drawn_is_its_text(small: tfkit.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("a fault of a plugin")

    monkeypatch.setattr(type(small.nodes[1].config), "build", broken)
    with pytest.raises(tfkit.SpecError, match="a fault of a plugin"):
        tfkit.draw(small)
    assert representations(small) == {"text/plain": "<Graph small: embedding, decoder, logits>"}


def test_params_are_a_table(small: tfkit.Graph) -> None:
    rows = Cells(representations(tfkit.count_params(small))["text/html"]).rows
    assert rows[0] == ["component", "parameters", "non-embedding"]
    assert rows[1] == ["embedding", "800", "0"]
    assert rows[-1] == ["total", "5,408", "4,480"]
    assert len(rows) == 7


def test_costs_are_a_table(small: tfkit.Graph) -> None:
    cost = tfkit.cost(small, length=4)
    rows = Cells(representations(cost)["text/html"]).rows
    assert rows[0] == ["component", "FLOPs", "bytes moved", "parameters"]
    assert [row[0] for row in rows[1:]] == [*(row.label for row in cost.rows()), "total"]
    assert rows[-1][3] == "5,408"


def test_text_stays_text() -> None:
    table = notebook_table("<b>", ["<i>"], [["<script>"]])
    assert Cells(table).rows == [["<i>"], ["<script>"]]
    assert not any(markup in table for markup in ("<b>", "<i>", "<script>"))


@pytest.mark.slow
def test_nothing_that_draws_is_imported_early() -> None:
    code = "import sys, tfkit; tfkit.load('gpt2'); print([name for name in sys.modules if 'tfkit.tools.draw' in name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

"""docs/attention.md and docs/mixers.md: their code is what `tfkit new plugin` writes, and their tables are complete."""

from __future__ import annotations

import re

import pytest

import tfkit
from tfkit.tools.new.command import TEMPLATE, PluginNames

from .page import ROOT, blocks, sessions

DOCS = ROOT / "docs"


@pytest.mark.parametrize(
    ("page", "file", "name", "slot"),
    [
        ("attention", "tfkit-angle/src/tfkit_angle/__init__.py", "angle", "attention"),
        ("mixers", "gated_conv.py", "gated_conv", "mixer"),
    ],
)
def test_the_code_of_a_page_is_the_template(page: str, file: str, name: str, slot: str) -> None:
    template = TEMPLATE / "slots" / slot / "src/tfkit_template/__init__.py"
    (text,) = [block.text for block in blocks(DOCS / f"{page}.md") if block.file == file]
    assert text == PluginNames(name, slot).rendered(template.read_text(encoding="utf-8"))


def test_the_first_page_is_short() -> None:
    page = DOCS / "first.md"
    text = page.read_text(encoding="utf-8")
    commands = [command for block in blocks(page) if block.language == "console" for _, command, _ in sessions(block)]
    assert "Eleven commands" in text
    assert len(commands) == 11
    assert text.count("\n") <= 150


@pytest.mark.parametrize("kind", [tfkit.Context, tfkit.Cache, tfkit.Past])
def test_help_says_every_field(kind: type) -> None:
    text = kind.__doc__ or ""
    for field in kind._fields:
        assert re.search(rf"^ +{field}: \w", text, re.MULTILINE), field
    page = (DOCS / "attention.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE)
    assert {*tfkit.Context._fields} <= {name for row in rows for name in re.findall(r"\w+", row)}

"""Replacement of a generated table in a Markdown page, between two comments."""

from __future__ import annotations

from pathlib import Path


def write_table(page: Path, name: str, table: str) -> None:
    """Replace the table `name` in a page, between `<!-- name -->` and `<!-- end of name -->`."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.read_text(encoding="utf-8").partition(start)
    page.write_text(f"{before}{start}{table}{end}{rest.partition(end)[2]}", encoding="utf-8")

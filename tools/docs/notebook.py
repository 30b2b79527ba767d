"""Write a page of the docs as a notebook: `python -m tools.docs.notebook docs/learn.md -o docs/examples/learn.ipynb`.

The page is the source. A block with a file name becomes a cell that writes the file, a block of Python becomes a cell,
and a console block becomes a cell that runs its commands. A picture becomes a cell that shows the file that an earlier
command wrote, so the notebook needs no file of the repository. The notebook contains no outputs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PART = re.compile(
    r"(?:^`(?P<file>[\w./-]+)`\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$"
    r"|^<img src=\"(?P<picture>[^\"]+)\"[^>]*>$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)\s]+(?=\))")
_COMMENT = re.compile(r"^<!-- .* -->\n\n?", re.MULTILINE)


def main() -> None:
    """Write the notebook of a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("-o", dest="output", type=Path, required=True)
    options = parser.parse_args()
    options.output.write_text(notebook_text(options.page, options.output.parent), encoding="utf-8")


def notebook_text(page: Path, folder: Path) -> str:
    """Return the notebook of a page as JSON. Its links lead from `folder`."""
    cells = [_cell(*cell) for cell in _cells(page, folder)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def _cells(page: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the type and the text of each cell. Formulas stay in the text between two cells of code."""
    text = _COMMENT.sub("", page.read_text(encoding="utf-8"))
    words, end = "", 0
    for part in _PART.finditer(text):
        words, end = words + text[end : part.start()], part.end()
        code = _code(part)
        if code is None:
            words += part[0]
            continue
        if words.strip():
            yield "markdown", _linked(words, page.parent, folder)
        yield "code", code
        words = ""
    if (words := words + text[end:]).strip():
        yield "markdown", _linked(words, page.parent, folder)


def _code(part: re.Match[str]) -> str | None:
    """Return the code of a block or a picture; None for text that is only read."""
    if part["picture"]:
        return f'from IPython.display import SVG\n\nSVG("{Path(part["picture"]).name}")'
    if part["file"]:
        return f"%%writefile {part['file']}\n{part['text']}"
    if part["language"] == "console":
        return "\n".join(f"!{command}" for command in re.findall(r"^\$ (.*)$", part["text"], re.MULTILINE))
    return part["text"] if part["language"] == "python" else None


def _linked(text: str, source: Path, folder: Path) -> str:
    """Return the text with links that lead from the folder of the notebook."""
    return _LINK.sub(lambda link: Path(os.path.relpath(source / link[0], folder)).as_posix(), text)


def _cell(kind: str, text: str) -> dict[str, Any]:
    source = text.strip("\n").splitlines(keepends=True)
    if kind == "markdown":
        return {"cell_type": kind, "metadata": {}, "source": source}
    return {"cell_type": kind, "execution_count": None, "metadata": {}, "outputs": [], "source": source}


if __name__ == "__main__":
    main()

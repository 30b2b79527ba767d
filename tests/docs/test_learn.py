"""The page docs/learn.md, its notebook, and its table of lines of the spec, the code and the picture."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

pytest.importorskip("tools.docs.notebook", reason="the notebook is written in a checkout")
from tools.docs.notebook import notebook_text

from .page import ROOT, blocks, matches, run, sessions

PAGE = ROOT / "docs" / "learn.md"
EXAMPLES = ROOT / "docs" / "examples"
NOTEBOOK = EXAMPLES / "learn.ipynb"
_ROW = re.compile(r"^\| `(.*?)` \| .*? \| `(.*?)` \| `.*?` \| `(.*?)` \|$", re.MULTILINE)


def cells() -> list[str]:
    """Return the cells of code of the notebook."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(cell: str, names: dict[str, Any], command: Callable[[str], str]) -> list[str]:
    """Execute a cell in the current folder, as a notebook does. Return the output of each of its commands."""
    first, _, text = cell.partition("\n")
    if first.startswith("%%writefile "):
        Path(first.removeprefix("%%writefile ")).write_text(text, encoding="utf-8")
        return []
    if first.startswith("!"):
        return [command(line.removeprefix("!")) for line in cell.splitlines()]
    exec(compile(cell, "learn.ipynb", "exec"), names)
    return []


def test_the_notebook_is_written_from_the_page(request: pytest.FixtureRequest) -> None:
    text = notebook_text(PAGE, EXAMPLES)
    if request.config.getoption("--renew-golden"):
        NOTEBOOK.write_text(text, encoding="utf-8")
    assert NOTEBOOK.read_text(encoding="utf-8") == text, "pytest tests/docs/test_learn.py --renew-golden"


def test_a_notebook_has_each_block_and_picture_of_its_page() -> None:
    sources = cells()
    for block in blocks(PAGE):
        commands = "\n".join(f"!{command}" for _, command, _ in sessions(block)) if block.language == "console" else ""
        assert block.language == "text" or [cell for cell in sources if (commands or block.text.strip()) in cell] != []
    pictures = [name for cell in sources for name in re.findall(r'^SVG\("(.*)"\)$', cell, re.MULTILINE)]
    for name in pictures:  # a notebook that is alone in a folder has its pictures
        assert [cell for cell in sources if cell.startswith("!") and f"-o {name}" in cell] != []
    assert pictures == ["masks.svg", "vaswani_base.svg"]


@pytest.mark.slow
def test_the_notebook_runs_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command prints what the page shows, and the rows of the table are in the files that the page writes."""

    def refuse(*_: object) -> NoReturn:
        raise OSError("a notebook must not open a connection")

    display = ModuleType("IPython.display")
    vars(display)["SVG"] = lambda name: pictures.append(Path(name).read_text(encoding="utf-8"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    pictures: list[str] = []
    names: dict[str, Any] = {}
    printed = [
        output for cell in cells() for output in execute(cell, names, lambda command: run(command, capsys.readouterr))
    ]
    expected = [text for block in blocks(PAGE) if block.language == "console" for _, _, text in sessions(block)]
    for text, output in zip(expected, printed, strict=True):
        assert matches(text, output), output
    masks, drawing = pictures
    assert masks == (EXAMPLES / "masks.svg").read_text(encoding="utf-8")
    rows = _ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(rows) == 12
    spec, code = (Path(name).read_text(encoding="utf-8") for name in ("paper.yaml", "paper.py"))
    labels = {"".join(parts) for parts in re.findall(r"<text[^>]*>(.*?)</text>", drawing)}
    labels = {re.sub(r"<[^>]*>", "", label) for label in labels}
    for line, statement, label in rows:
        assert line in spec
        assert statement in code
        assert any(label in text for text in labels), label

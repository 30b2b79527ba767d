"""Runs a page of the docs as a reader would: writes the files, runs the commands, and executes Python in order.

    `name.py`        on the line above a block: the block is that file
    ```python        runs, with the names of the page's earlier blocks
    ```yaml          a spec, which is built on the meta device
    ```console       lines that begin with `$ ` are run; the others are what they print
                     (lm_eval in a process without tfkit, if it is installed)
    ```toml, ```text, ```sh   are only read, unless they are files

Printed text may leave out lines, `...` on a line of its own, and the rest of one, ` ...` at its end. Times and the last
digits of small differences are not compared.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import unified_diff
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import tfkit
from tfkit.cli import main

ROOT = Path(__file__).parents[2]
LANGUAGES = {"python", "yaml", "toml", "console", "sh", "text"}
SLOW = ("python ", "tfkit eject", "tfkit export", "tfkit profile")
_BLOCK = re.compile(
    r"(?:^`(?P<file>[\w./-]+)`\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_TIME = re.compile(r"\d+(\.\d+)? ?(ms|s)\b")
_TINY = re.compile(r"\d\.\de[-+]\d\d")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the file that it is."""

    language: str
    text: str
    file: str | None
    line: int
    """The line of the page above the text."""


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    actual = [
        Block(match["language"], match["text"], match["file"], text.count("\n", 0, match.start("text")))
        for match in _BLOCK.finditer(text)
    ]
    assert len(actual) == text.count("```") / 2, "a block that nobody reads"
    assert {match.language for match in actual} <= LANGUAGES
    return actual


def sessions(block: Block) -> Iterator[tuple[int, str, str]]:
    """Lines of the page with a command, the commands, and what they print."""
    before, *parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)
    assert not before
    line = block.line + 1
    for command, printed in zip(parts[::2], parts[1::2], strict=True):
        yield line, command, printed
        line += 1 + printed.count("\n")


def follow(page: Path, folder: Path, printed_by: Callable[[str], str], *, hurry: bool = False) -> dict[str, Any]:
    """Do in a folder, which is the current one, what a page says; the names that its Python leaves.

    In a hurry, what takes long is left out. A failure shows the lines of the page, not this function.
    """
    __tracebackhide__ = True
    torch.manual_seed(0)  # pages draw weights and tokens, and compare them within tolerances
    names: dict[str, Any] = {}
    for block in blocks(page):
        if block.file is not None:
            file = folder / block.file
            file.parent.mkdir(exist_ok=True, parents=True)
            file.write_text(block.text, encoding="utf-8")
        elif block.language == "yaml":
            assert tfkit.build(tfkit.loads(block.text), device="meta").code
        elif block.language == "python" and not (hurry and "check_component" in block.text):
            exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
        elif block.language == "console":
            for line, command, expected in sessions(block):
                if (hurry and command.startswith(SLOW)) or (command.startswith("lm_eval") and not has_lm_eval()):
                    continue
                printed = printed_by(command)
                if not matches(expected, printed):
                    diff = unified_diff(expected.split("\n"), printed.split("\n"), "the page", "now", lineterm="")
                    raise AssertionError("\n".join([f"{page.name}:{line}: $ {command}", *diff]))
    return names


def run(command: str, read: Callable[[], tuple[str, str]]) -> str:
    """What a command prints; `read` gives what was printed since it was last called."""
    program, *arguments = shlex.split(os.path.expandvars(command))
    if program == "tfkit":
        main(arguments)
        return "".join(reversed(read()))
    if program == "lm_eval":
        start = "import sys; sys.modules['tfkit'] = None; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
        command = [sys.executable, "-I", "-c", start, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    if program == "export":
        os.environ.update(argument.split("=", 1) for argument in arguments)
        return ""
    if program == "cat":
        return "".join(Path(name).read_text(encoding="utf-8") for name in arguments)
    assert program == "python"
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=300)
    return done.stdout + done.stderr


def has_lm_eval() -> bool:
    """Return True if lm-eval is installed. It is part of the group `around`."""
    return find_spec("lm_eval") is not None


def matches(expected: str, printed: str) -> bool:
    """Whether a text is what a page shows."""
    pattern = ""
    for line in expected.strip().splitlines():
        if line == "...":
            pattern += r"(?:.*\n)*?"
        else:
            start = re.escape(_rounded(line.removesuffix(" ...")))
            pattern += start + (" .*" if line.endswith(" ...") else "") + r"\n"
    lines = "".join(f"{line.rstrip()}\n" for line in printed.strip().splitlines())
    return re.fullmatch(pattern, _rounded(lines)) is not None


def _rounded(text: str) -> str:
    return _TINY.sub("<tiny>", _TIME.sub("<time>", text))

"""A docstring begins with a noun or a verb: not with a question word, and not with a reference to another one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ["tools", "tfkit", "plugins/*/src/**/*.py"]
BEGINNING = re.compile(r"(What|Whether|Which|How|Where|The same)\b")
PHRASES = re.compile(
    r"\bbelongs? into\b|\bso many\b|(?<!there )\b(is|are) no (?!longer\b)[a-z-]+ (that|of)\b|\bin front of\b"
)


def files(folder: str) -> list[Path]:
    return sorted(ROOT.glob(folder) if "*" in folder else (ROOT / folder).rglob("*.py"))


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Those of modules, classes and functions, and the texts below attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", ())
        for line in body if isinstance(body, list) else ():
            if (
                isinstance(line, ast.Expr)
                and isinstance(line.value, ast.Constant)
                and isinstance(line.value.value, str)
            ):
                yield line.value


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_begins_with_a_question_word(folder: str) -> None:
    assert files(folder)
    for path in files(folder):
        for one in docstrings(ast.parse(path.read_text())):
            assert not BEGINNING.match(one.value), f"{path.relative_to(ROOT)}:{one.lineno}: {one.value[:60]}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_texts_have_english_word_order(folder: str) -> None:
    """The phrases are those that came back most often; errors and comments count too."""
    for path in files(folder):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not PHRASES.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"

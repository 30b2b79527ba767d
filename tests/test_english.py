"""The English of the project, as far as a program can check it: names, first words, phrases.

`CONTRIBUTING.md` has the rules. `UNEDITED` lists what the editing pass has not reached: it only shrinks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = ["tfkit/**/*.py", "plugins/*/src/**/*.py", "tools/**/*.py"]
PAGES = ["README.md", "docs/*.md", "plugins/*/README.md"]

NAMES = re.compile(r"(one|found|given|made|said|told|known|own|wanted|wrong|every|some|others|beside)\Z")
"""Names that do not say what they hold. A numeral in prose is fine."""
PHRASES = re.compile(r"\b(that of|those of|beside|of its own|by itself|alike|in pieces|leavings)\b", re.IGNORECASE)
WORD_ORDER = re.compile(
    r"\bbelongs? into\b|\bso many\b|(?<!there )\b(is|are) no (?!longer\b)[a-z-]+ (that|of)\b|\bin front of\b"
)
QUESTION = re.compile(r"(What|Whether|Which|How|Where|The same)\b")
NO_VERB = re.compile(
    r"(an?|all|any|both|each|every|for|from|if|in|its?|itself|no|none|nothing|one|only|other|such|that|the|their|these|"
    r"this|those|true|false|when|who|with|within|without)\b",
    re.IGNORECASE,
)
"""Words at the beginning of a description of the result, where a function's docstring needs a verb."""

UNEDITED: dict[str, tuple[str, ...]] = {
    "names": (
        "tfkit/components/fields/rotary.py",
        "tfkit/components/runs/callbacks.py",
        "tfkit/components/runs/muon.py",
        "tfkit/graph/run_meaning.py",
        "tfkit/spec/run.py",
        "tools/bench/build_time.py",
    ),
    "verbs": ("tfkit/tools/new/template/tests/test_template.py",),
    "phrases": ("tfkit/tools/new/template/tests/test_template.py",),
    "": (),
}
"""Beginnings of paths that a rule does not apply to yet."""


def files(patterns: list[str], rule: str) -> list[Path]:
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return [path for path in paths if not str(path.relative_to(ROOT)).startswith(UNEDITED[rule] or ("/",))]


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the arguments and assigned names of a module, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the functions that are not properties."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if not any("property" in decorator for decorator in decorators):
                yield node


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of modules, classes and functions, and the texts below attributes, with their lines."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for line in body if isinstance(body, list) else ():
            text = line.value if isinstance(line, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text.lineno, text.value


def findings(rule: str, patterns: list[str], find: Callable[[ast.AST], Iterator[tuple[int, str]]]) -> list[str]:
    paths = files(patterns, rule)
    assert paths or UNEDITED[rule]
    return [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in paths
        for line, text in find(ast.parse(path.read_text(encoding="utf-8")))
    ]


def test_names_are_nouns_of_the_field() -> None:
    assert not findings("names", CODE, lambda tree: ((line, name) for line, name in names(tree) if NAMES.match(name)))


def test_docstrings_of_functions_start_with_a_verb() -> None:
    def find(tree: ast.AST) -> Iterator[tuple[int, str]]:
        for function in functions(tree):
            text = ast.get_docstring(function)
            if text and (NO_VERB.match(text) or QUESTION.match(text) or not text[0].isupper()):
                yield function.lineno, text.partition("\n")[0]

    assert not findings("verbs", CODE, find)


@pytest.mark.parametrize(("pattern", "rule"), [(PHRASES, "phrases"), (QUESTION, None), (WORD_ORDER, None)])
def test_docstrings_are_plain_english(pattern: re.Pattern[str], rule: str | None) -> None:
    def find(tree: ast.AST) -> Iterator[tuple[int, str]]:
        for line, text in docstrings(tree):
            match = pattern.match(text) if pattern is QUESTION else pattern.search(text)
            if match:
                yield line, match[0]

    assert not findings(rule or "", CODE, find)


def test_pages_are_plain_english() -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in files(PAGES, "phrases")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in PHRASES.finditer(line)
    ]
    assert not lines

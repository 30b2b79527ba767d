"""The English of the project, as far as a program can check it: names, first words, phrases.

`CONTRIBUTING.md` has the rules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = ["tfkit/**/*.py", "plugins/*/src/**/*.py", "tools/**/*.py"]
TESTS = ["tests/**/*.py", "plugins/*/tests/**/*.py"]
PAGES = ["README.md", "stability.md", "docs/*.md", "plugins/*/README.md"]

NAMES = re.compile(r"(one|found|given|made|said|told|known|own|wanted|wrong|every|some|others|beside)\Z")
"""Names that do not say what they hold. A numeral in prose is fine."""
ADJECTIVES = re.compile(
    r"_?((MOST|LEAST)_.*|MOST|LEAST|LONGEST|SHORTEST|SHORTER|LARGEST|SMALLEST|LARGE|SMALL|LONG|SHORT|PLAIN|NEAR|FAR|"
    r"USUAL|SAME|SPECIAL|QUICK|FEW|MANY|SEVERAL|SOME|EACH|ALL|BOTH|OTHERS?|ONE|NOTHING|EVERYTHING|REST|APART|SHOWN|KEPT|"
    r"OWN|OURS|THEIRS|MINE)\Z"
)
"""Constants that are an adjective, a superlative or a pronoun. The noun that they leave out says what they hold."""
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
PHRASES = re.compile(r"\b(that of|those of|beside|of its own|by itself|alike|in pieces|leavings)\b", re.IGNORECASE)
WORD_ORDER = re.compile(
    r"\bbelongs? into\b|\bso many\b|(?<!there )\b(is|are) no (?!longer\b)[a-z-]+ (that|of)\b|\bin front of\b"
)
QUESTION = re.compile(r"(What|Whether|Which|How|Where|The same)\b")
MESSAGE = re.compile(
    r", not \{|\bone of \{\}, not\b|\btoo\Z|\b(goes without|at once|as a whole|asked for|cannot be had)\b"
    r"|\b(believes|heeds|obeys|knows|speaks|promises)\b"
)
"""Forms that are never right in a message; `{}` is a value that is filled in."""
ERRORS = {"Diagnostic", "Invalid", "SpecError", "ValueError", "TypeError", "UsageError", "BadParameter", "error"}
ADVICE = {"help", "notes"}
NO_VERB = re.compile(
    r"(an?|all|any|both|each|every|for|from|if|in|its?|itself|no|none|nothing|one|only|other|such|that|the|their|these|"
    r"this|those|true|false|when|who|with|within|without)\b",
    re.IGNORECASE,
)
"""Words at the beginning of a description of the result, where a function's docstring needs a verb."""


def files(patterns: list[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


@lru_cache(maxsize=2)  # a module and a function of it
def nodes(tree: ast.AST) -> list[ast.AST]:
    return [*ast.walk(tree)]


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the arguments and assigned names of a module, with their lines.

    Fields of a config are left out: they are keys of a spec, where `every: 100` reads well.
    """
    classes = [node for node in nodes(tree) if isinstance(node, ast.ClassDef)]
    fields = {id(line.target) for node in classes for line in node.body if isinstance(line, ast.AnnAssign)}
    for node in nodes(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.lineno, node.id
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the functions that are not properties."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if not any("property" in decorator for decorator in decorators):
                yield node


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of modules, classes and functions, and the texts below attributes, with their lines."""
    for node in nodes(tree):
        body = getattr(node, "body", None)
        for line in body if isinstance(body, list) else ():
            text = line.value if isinstance(line, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text.lineno, text.value


def texts(node: ast.AST, variables: dict[str, list[ast.expr]]) -> Iterator[tuple[int, str]]:
    """Yield the texts in an expression, with `{}` for values, and the texts of the variables that it names."""
    if isinstance(node, ast.JoinedStr):
        yield node.lineno, "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        parts: Iterator[ast.AST] = (part for part in node.values if isinstance(part, ast.FormattedValue))
    else:
        parts = ast.iter_child_nodes(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    if isinstance(node, ast.Name):
        for value in variables.get(node.id, ()):
            yield from texts(value, {})
    for part in parts:
        yield from texts(part, variables)


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the texts of errors, notes and help, with their lines, also if a local variable holds them first."""
    for function in [node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.Module)]:
        variables: dict[str, list[ast.expr]] = {}
        for node in nodes(function) if isinstance(function, ast.FunctionDef) else ():
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                pairs = zip(target.elts, node.value.elts, strict=False) if _are_tuples(node) else [(target, node.value)]
                for name, value in pairs:
                    if isinstance(name, ast.Name):
                        variables.setdefault(name.id, []).append(value)
        for call in [node for node in nodes(function) if isinstance(node, ast.Call)]:
            arguments = [keyword.value for keyword in call.keywords if keyword.arg in ADVICE]
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name in ERRORS:
                arguments += call.args[name == "Invalid" :]  # its first argument is a path
            for argument in arguments:
                yield from texts(argument, variables)


def _are_tuples(node: ast.Assign) -> bool:
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def forbidden_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    return ((line, name) for line, name in names(tree) if NAMES.match(name))


def docstrings_without_a_verb(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for function in functions(tree):
        text = ast.get_docstring(function)
        if text and (NO_VERB.match(text) or QUESTION.match(text) or not text[0].isupper()):
            yield function.lineno, text.partition("\n")[0]


def odd_docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for line, text in docstrings(tree):
        if match := PHRASES.search(text) or WORD_ORDER.search(text) or QUESTION.match(text):
            yield line, match[0]


def odd_messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for line, text in set(messages(tree)):
        if match := PHRASES.search(text) or MESSAGE.search(text):
            yield line, f"{match[0]}: {text}"


def constants(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the names that a module assigns at its top level, with their lines."""
    for line in tree.body if isinstance(tree, ast.Module) else ():
        targets = (
            line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
        )
        for name in [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]:
            if isinstance(name.ctx, ast.Store):
                yield name.lineno, name.id


def adjectives(tree: ast.AST) -> Iterator[tuple[int, str]]:
    return ((line, name) for line, name in constants(tree) if ADJECTIVES.match(name))


def constants_bound_twice(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the names that a module assigns twice at its top level. The second value would replace the first one."""
    bound: set[str] = set()
    for line, name in constants(tree):
        if name in bound:
            yield line, f"{name} is bound twice"
        bound.add(name)


def findings(patterns: list[str], *rules: Callable[[ast.AST], Iterator[tuple[int, str]]]) -> list[str]:
    paths = files(patterns)
    assert paths
    return [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in paths
        for tree in [ast.parse(path.read_text(encoding="utf-8"))]
        for rule in rules
        for line, text in rule(tree)
    ]


def test_code_is_plain_english() -> None:
    """One test, because parsing takes most of its time."""
    of_names = forbidden_names, adjectives, constants_bound_twice
    of_texts = docstrings_without_a_verb, odd_docstrings, odd_messages
    assert not findings(CODE, *of_names, *of_texts)


@pytest.mark.slow  # parses all tests
def test_names_in_tests_are_nouns_of_the_field() -> None:
    assert not findings(TESTS, forbidden_names, adjectives)


def test_few_classes_share_their_name() -> None:
    """Two modules may each have a `Row`. At the third, a reader no longer knows which one a text means."""
    modules: dict[str, list[str]] = {}
    for path in files(["tfkit/**/*.py"]):
        if "template" not in path.parts:
            for name in CLASS.findall(path.read_text(encoding="utf-8")):
                modules.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in modules.items() if len(paths) > 2}


def test_pages_are_plain_english() -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in files(PAGES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in PHRASES.finditer(line)
    ]
    assert not lines

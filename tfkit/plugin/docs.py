"""The documentation of a config's fields: the text below each of them in its source.

It is read on demand. pydantic's own `use_attribute_docstrings` reads the source of every class while it is imported,
which takes longer than the rest of the import.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache

from tfkit.component import Config


def first_paragraph(docs: str) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join(inspect.cleandoc(docs).partition("\n\n")[0].split())


@cache
def field_docs(config: type[Config]) -> Mapping[str, str]:
    """The texts of a config's fields by name, inherited ones too; fields without a text are omitted."""
    docs: dict[str, str] = {}
    for base in reversed(config.__mro__):
        docs |= _class_docs(base.__module__).get(base.__qualname__, {})
    given = {name: info.description for name, info in config.model_fields.items() if info.description}
    return {name: text for name, text in {**docs, **given}.items() if name in config.model_fields}


@cache
def _class_docs(module: str) -> Mapping[str, Mapping[str, str]]:
    """The texts in each class of a module, by its qualified name; empty if there is no source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError, SyntaxError):
        return {}
    return {name: dict(_attribute_docs(one)) for name, one in _classes(tree, "")}


def _classes(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for one in ast.iter_child_nodes(tree):
        if isinstance(one, ast.ClassDef):
            yield f"{prefix}{one.name}", one
            yield from _classes(one, f"{prefix}{one.name}.")
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _classes(one, f"{prefix}{one.name}.<locals>.")
        else:
            yield from _classes(one, prefix)


def _attribute_docs(tree: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for one, below in zip(tree.body, tree.body[1:], strict=False):
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            yield one.target.id, inspect.cleandoc(below.value.value)

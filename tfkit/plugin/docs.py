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
    """Return the first paragraph of a docstring on one line."""
    return " ".join(inspect.cleandoc(docs).partition("\n\n")[0].split())


@cache
def field_docs(config: type[Config]) -> Mapping[str, str]:
    """Return the texts of a config's fields by name, inherited fields included; fields without a text are omitted."""
    docs: dict[str, str] = {}
    for base in reversed(config.__mro__):
        docs |= _class_docs(base.__module__).get(base.__qualname__, {})
    described = {name: info.description for name, info in config.model_fields.items() if info.description}
    return {name: text for name, text in {**docs, **described}.items() if name in config.model_fields}


@cache
def _class_docs(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the texts in each class of a module, by its qualified name; empty if there is no source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError, SyntaxError):
        return {}
    return {name: dict(_attribute_docs(node)) for name, node in _classes(tree, "")}


def _classes(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}", node
            yield from _classes(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _classes(node, f"{prefix}{node.name}.<locals>.")
        else:
            yield from _classes(node, prefix)


def _attribute_docs(tree: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            yield field.target.id, inspect.cleandoc(below.value.value)

"""Functions, records and constants as text."""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any, Optional, Union

import torch
from torch import nn

from tfkit.plugin.docs import first_paragraph
from tfkit.tools.eject.call_graph import Specialised, Whole

INDENT = "    "
DOCS = 104
"""Longest line of a docstring, in characters."""
_KNOWN = [torch.Tensor, type(None), *(one for one in vars(builtins).values() if isinstance(one, type))]
"""Types that have a name in every file, besides those of `torch` and `nn`."""


def function_text(name: str, entry: Specialised, whole: Whole, *, method: bool) -> str:
    """A function or a method, with the arguments that are left."""
    parameters = ["self"] * method + [_parameter(entry, one, whole) for one in entry.parameters]
    result = annotation(entry.code.tree.returns, entry, whole)
    head = f"def {name}({', '.join(parameters)}){f' -> {result}' if result else ''}:"
    docs = ast.get_docstring(entry.code.tree)
    lines = docs_text(docs).splitlines() if docs else []
    lines += steps_text(entry.body).splitlines()
    return "\n".join([head, *(INDENT + line if line else line for line in lines)])


def docs_text(docs: str) -> str:
    """The first paragraph of a docstring as a docstring."""
    words = in_docs(first_paragraph(docs))
    if len(words) <= DOCS:
        return f'"""{words} """' if words.endswith('"') else f'"""{words}"""'
    return "\n".join(['"""' + line if i == 0 else line for i, line in enumerate(textwrap.wrap(words, DOCS))] + ['"""'])


def in_docs(words: str) -> str:
    """Any words, escaped for a docstring."""
    shown = "".join(letter for letter in words if letter.isprintable() or letter == "\n")
    return shown.replace("\\", "\\\\").replace('"""', "'''")


def _parameter(entry: Specialised, name: str, whole: Whole) -> str:
    argument = next(one for one in entry.code.tree.args.args if one.arg == name)
    said = annotation(argument.annotation, entry, whole)
    default = entry.code.parameters[name].default
    name = entry.names.get(name, name)
    text = f"{name}: {said}" if said else name
    return text if default is inspect.Parameter.empty else f"{text} = {default!r}"


def annotation(node: ast.expr | None, entry: Specialised, whole: Whole) -> str:
    """A type as text; empty if the file does not have a name for it."""
    return "" if node is None else _type_text(node, entry.code.named, whole)


def _type_text(node: ast.expr, named: Callable[[str], Any], whole: Whole) -> str:
    try:
        text = ast.unparse(_Types(named, whole).visit(copy.deepcopy(node)))
    except KeyError:
        return ""
    return text.replace("torch.Tensor", "Tensor")


class _Types(ast.NodeTransformer):
    """Writes types by their names in the file; raises KeyError for a type without one."""

    def __init__(self, named: Callable[[str], Any], whole: Whole) -> None:
        self.named = named
        self.whole = whole

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        kind = self.value(node.value)
        if kind not in (Union, Optional):
            return self.generic_visit(node)
        members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        every = [self.visit(one) for one in members] + ([ast.Constant(None)] if kind is Optional else [])
        return functools.reduce(lambda one, other: ast.BinOp(one, ast.BitOr(), other), every)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        owner = self.value(node.value)
        if owner is torch or owner is nn:
            return ast.Attribute(ast.Name(owner.__name__.removeprefix("torch.")), node.attr)
        return ast.Name(self.name(self.value(node)))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.name(self.named(node.id)))

    def value(self, node: ast.expr) -> Any:
        """The object that a name, or an attribute of one, stands for."""
        if isinstance(node, ast.Attribute):
            return getattr(self.value(node.value), node.attr, None)
        return self.named(node.id) if isinstance(node, ast.Name) else None

    def name(self, value: Any) -> str:
        """The name of a type in the file; raises KeyError if it has none."""
        if isinstance(value, type) and value in self.whole.records:
            only = self.whole.alone(value)
            return value.__name__ if only is None else _field_types(value, self.whole)[only]
        if not any(value is one for one in _KNOWN):
            raise KeyError(value)
        return "None" if value is type(None) else str(value.__name__)


def steps_text(steps: list[ast.stmt]) -> str:
    """Statements as text, with tuples bare where a person leaves out the brackets."""
    for step in steps:
        for node in ast.walk(step):
            if isinstance(node, ast.Return | ast.Assign) and isinstance(node.value, ast.Tuple) and node.value.elts:
                several = len(node.value.elts) > 1
                node.value = ast.Name(", ".join(map(ast.unparse, node.value.elts)) + "," * (not several))
            if isinstance(node, ast.Assign):
                node.targets = [_bare(target) for target in node.targets]
    return ast.unparse(ast.Module(steps, []))


def _bare(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Tuple):
        return ast.Name(", ".join(map(ast.unparse, target.elts)))
    return target


def record_text(kind: type, fields: list[str], whole: Whole) -> str:
    """A `NamedTuple` with the fields that are left."""
    lines = [f"class {kind.__name__}(NamedTuple):"]
    docs = ast.get_docstring(_tree(kind))
    if docs:
        lines += [textwrap.indent(docs_text(docs), INDENT), ""]
    lines += [f"{INDENT}{name}: {said}" for name, said in _field_types(kind, whole).items() if name in fields]
    return "\n".join(lines if len(lines) > 1 else [*lines, f"{INDENT}pass"])


def _field_types(kind: type, whole: Whole) -> dict[str, str]:
    """The types of a record's fields, by their names in the file."""
    outside = {**vars(builtins), **vars(sys.modules[kind.__module__])}
    said = {
        step.target.id: step.annotation
        for step in _tree(kind).body
        if isinstance(step, ast.AnnAssign) and isinstance(step.target, ast.Name)
    }
    return {name: _type_text(one, outside.__getitem__, whole) or "object" for name, one in said.items()}


def _tree(kind: type) -> ast.ClassDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return tree

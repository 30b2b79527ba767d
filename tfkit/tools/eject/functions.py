"""Functions, records and constants as text."""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import sys
import textwrap
from collections import ChainMap
from collections.abc import Mapping
from typing import Any, Optional, Union

import torch

from tfkit.plugin.registry import first_paragraph
from tfkit.tools.eject.cleanup import Replaced, reads
from tfkit.tools.eject.code import tree_of
from tfkit.tools.eject.statements import Function
from tfkit.tools.eject.torch_modules import name_of
from tfkit.tools.eject.values import Record
from tfkit.tools.eject.whole import Whole

INDENT = "    "
DOCS = 104
"""Longest line of a docstring, in characters."""


def function_text(function: Function) -> str:
    """Return a function or a method, with the arguments that are left."""
    names = _names_of_records(function)
    parameters = ["self"] * (function.module is not None)
    parameters += [_parameter(function, name, names.get(name, name)) for name in function.parameters]
    result = _type_text(function.code.tree.returns, function.code.names, function.whole)
    head = f"def {function.name}({', '.join(parameters)}){f' -> {result}' if result else ''}:"
    docs = ast.get_docstring(function.code.tree)
    lines = docs_text(docs).splitlines() if docs else []
    renamed = Replaced({name: ast.Name(new) for name, new in names.items()})
    lines += steps_text([renamed.visit(step) for step in function.body]).splitlines()
    return "\n".join([head, *(INDENT + line if line else line for line in lines)])


def _names_of_records(function: Function) -> dict[str, str]:
    """Return new names for parameters that are records with only one field left: the name of that field."""
    taken = reads(function.code.tree)
    names = {}
    for name, value in function.arguments.items():
        field = function.whole.alone(value.type) if isinstance(value, Record) and value.type else None
        if field is not None and field not in taken:
            names[name] = name.replace("context", field) if "context" in name else field
    return names


def docs_text(docs: str) -> str:
    """Return the first paragraph of a docstring as a docstring."""
    words = in_docs(first_paragraph(docs))
    if len(words) <= DOCS:
        return f'"""{words} """' if words.endswith('"') else f'"""{words}"""'
    return "\n".join(['"""' + line if i == 0 else line for i, line in enumerate(textwrap.wrap(words, DOCS))] + ['"""'])


def in_docs(words: str) -> str:
    """Escape a text for a docstring."""
    shown = "".join(letter for letter in words if letter.isprintable() or letter == "\n")
    return shown.replace("\\", "\\\\").replace('"""', "'''")


def _parameter(function: Function, name: str, written: str) -> str:
    argument = next(parameter for parameter in function.code.tree.args.args if parameter.arg == name)
    annotation = _type_text(argument.annotation, function.code.names, function.whole)
    default = function.code.parameters[name].default
    text = f"{written}: {annotation}" if annotation else written
    return text if default is inspect.Parameter.empty else f"{text} = {default!r}"


def _type_text(node: ast.expr | None, names: Mapping[str, Any], whole: Whole) -> str:
    """Return a type as text; empty if the file does not have a name for it."""
    try:
        return "" if node is None else ast.unparse(_Types(names, whole).visit(copy.deepcopy(node)))
    except KeyError:
        return ""


class _Types(ast.NodeTransformer):
    """Writes types by their names in the file; raises KeyError for a type without one."""

    def __init__(self, names: Mapping[str, Any], whole: Whole) -> None:
        self.names = names
        self.whole = whole

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        kind = self.value(node.value)
        if kind not in (Union, Optional):
            return self.generic_visit(node)
        members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return ast.Name(
            " | ".join([ast.unparse(self.visit(member)) for member in members] + ["None"] * (kind is Optional))
        )

    def visit_Name(self, node: ast.Name | ast.Attribute) -> ast.AST:
        return ast.Name(self.name(self.value(node)))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self.visit_Name(node)

    def value(self, node: ast.expr) -> Any:
        """Return the object that a name, or an attribute of a name, stands for."""
        if isinstance(node, ast.Attribute):
            return getattr(self.value(node.value), node.attr, None)
        return self.names[node.id] if isinstance(node, ast.Name) else None

    def name(self, value: Any) -> str:
        """Return the name of a type in the file. Raise KeyError if it has none."""
        if not isinstance(value, type):
            raise KeyError(value)
        if value in self.whole.records:
            only = self.whole.alone(value)
            return value.__name__ if only is None else _field_types(value, self.whole)[only]
        if value in (torch.Tensor, vars(builtins).get(value.__name__)):
            return value.__name__
        name = name_of(value) if value.__module__.partition(".")[0] == "torch" else None
        if name is None:
            raise KeyError(value)
        return name


def steps_text(steps: list[ast.stmt]) -> str:
    """Return statements as text, without the brackets around tuples that a person leaves out."""
    for step in steps:
        for node in ast.walk(step):
            if isinstance(node, ast.Return | ast.Assign) and node.value is not None:
                node.value = _bare(node.value)
            if isinstance(node, ast.Assign):
                node.targets = list(map(_bare, node.targets))
    return ast.unparse(ast.Module(steps, []))


def _bare(node: ast.expr) -> ast.expr:
    if not (isinstance(node, ast.Tuple) and node.elts):
        return node
    return ast.Name(", ".join(map(ast.unparse, node.elts)) + "," * (len(node.elts) == 1))


def record_text(kind: type, whole: Whole) -> str:
    """Return a `NamedTuple` with the fields that are left."""
    lines = [f"class {kind.__name__}(NamedTuple):"]
    if docs := ast.get_docstring(_tree(kind)):
        lines += [textwrap.indent(docs_text(docs), INDENT), ""]
    fields = [
        f"{INDENT}{n}: {annotation}" for n, annotation in _field_types(kind, whole).items() if n in whole.fields(kind)
    ]
    return "\n".join([*lines, *fields] if docs or fields else [*lines, f"{INDENT}pass"])


def _field_types(kind: type, whole: Whole) -> dict[str, str]:
    """Return the types of a record's fields, by their names in the file."""
    outside = ChainMap(vars(sys.modules[kind.__module__]), vars(builtins))
    annotations = [step for step in _tree(kind).body if isinstance(step, ast.AnnAssign)]
    return {ast.unparse(step.target): _type_text(step.annotation, outside, whole) or "object" for step in annotations}


def _tree(kind: type) -> ast.ClassDef:
    tree = tree_of(kind)
    assert isinstance(tree, ast.ClassDef)
    return tree

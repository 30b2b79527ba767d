"""Writes functions, records and classes as text."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import textwrap
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from tfkit.plugin.registry import first_paragraph
from tfkit.tools.eject.cleanup import Replaced, copied_tree, statement_blocks, variable_names
from tfkit.tools.eject.config import CONFIG, ConfigClass, name_of
from tfkit.tools.eject.patterns import pattern_comments
from tfkit.tools.eject.source import tree_of
from tfkit.tools.eject.specialise import Function
from tfkit.tools.eject.values import Records, RecordValue

INDENT = "    "
DOCS = 104
"""Maximum length of a line of a docstring, in characters."""


def function_text(function: Function) -> str:
    """Return the text of a function or method, with the remaining arguments."""
    names = _names_of_records(function)
    parameters = ["self"] * (function.module is not None)
    parameters += [_parameter_text(function, name, names.get(name, name)) for name in function.parameters]
    result = _type_text(function.code.tree.returns, function.code.names, function.records)
    head = f"def {function.name}({', '.join(parameters)}){f' -> {result}' if result else ''}:"
    docs = ast.get_docstring(function.code.tree)
    lines = docs_text(docs).splitlines() if docs else []
    renamed = Replaced({name: ast.Name(new) for name, new in names.items()})
    lines += steps_text([renamed.visit(step) for step in function.body]).splitlines()
    return "\n".join([head, *(INDENT + line if line else line for line in lines)])


def _names_of_records(function: Function) -> dict[str, str]:
    """Return new names for parameters that are records with a single remaining field: the name of that field."""
    taken = variable_names(function.code.tree)
    names = {}
    for name, value in function.arguments.items():
        field = function.records.alone(value.type) if isinstance(value, RecordValue) and value.type else None
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
    printable = "".join(letter for letter in words if letter.isprintable() or letter == "\n")
    return printable.replace("\\", "\\\\").replace('"""', "'''")


def _parameter_text(function: Function, name: str, written: str) -> str:
    argument = next(parameter for parameter in function.code.tree.args.args if parameter.arg == name)
    annotation = _type_text(argument.annotation, function.code.names, function.records)
    default = function.code.parameters[name].default
    text = f"{written}: {annotation}" if annotation else written
    return text if default is inspect.Parameter.empty else f"{text} = {default!r}"


def _type_text(node: ast.expr | None, names: Mapping[str, Any], records: Records) -> str:
    """Return a type as text; empty if it has no name in the file."""
    try:
        return "" if node is None else ast.unparse(_Types(names, records).visit(copied_tree(node)))
    except KeyError:
        return ""


class _Types(ast.NodeTransformer):
    """Writes types by their names in the file; raises KeyError for a type without one."""

    def __init__(self, names: Mapping[str, Any], records: Records) -> None:
        self.names = names
        self.records = records

    def visit_Name(self, node: ast.Name | ast.Attribute) -> ast.AST:
        return ast.Name(self.name(self.value(node)))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self.visit_Name(node)

    def value(self, node: ast.expr) -> Any:
        """Return the object to which a name, or an attribute of a name, refers."""
        if isinstance(node, ast.Attribute):
            return getattr(self.value(node.value), node.attr, None)
        return self.names[node.id] if isinstance(node, ast.Name) else None

    def name(self, value: Any) -> str:
        """Return the name of a type in the file. Raise KeyError if it has none."""
        if not isinstance(value, type):
            raise KeyError(value)
        if value in self.records:
            only = self.records.alone(value)
            return value.__name__ if only is None else _field_types(value, self.records)[only]
        if value in (torch.Tensor, vars(builtins).get(value.__name__)):
            return value.__name__
        name = name_of(value) if value.__module__.partition(".")[0] == "torch" else None
        if name is None:
            raise KeyError(value)
        return name


def steps_text(steps: list[ast.stmt]) -> str:
    """Return statements as text, without unnecessary parentheses around tuples, and with patterns as comments."""
    steps = copied_tree(steps)
    for block in statement_blocks(steps):
        block[:] = [line for step in block for line in (*pattern_comments(step), step)]
    for step in steps:
        for node in ast.walk(step):
            if isinstance(node, ast.Return | ast.Assign) and node.value is not None:
                node.value = _without_parentheses(node.value)
            if isinstance(node, ast.Assign):
                node.targets = list(map(_without_parentheses, node.targets))
    return ast.unparse(ast.Module(steps, []))


def _without_parentheses(node: ast.expr) -> ast.expr:
    if not (isinstance(node, ast.Tuple) and node.elts):
        return node
    return ast.Name(", ".join(map(ast.unparse, node.elts)) + "," * (len(node.elts) == 1))


def record_text(kind: type, records: Records) -> str:
    """Return the text of a `NamedTuple` with the remaining fields."""
    lines = [f"class {kind.__name__}(NamedTuple):"]
    if docs := ast.get_docstring(_class_definition(kind)):
        lines += [textwrap.indent(docs_text(docs), INDENT), ""]
    fields = [
        f"{INDENT}{n}: {annotation}" for n, annotation in _field_types(kind, records).items() if n in records.left(kind)
    ]
    return "\n".join([*lines, *fields] if docs or fields else [*lines, f"{INDENT}pass"])


def _field_types(kind: type, records: Records) -> dict[str, str]:
    """Return the types of a record's fields, by their names in the file."""
    outside = ChainMap(vars(sys.modules[kind.__module__]), vars(builtins))
    annotations = [step for step in _class_definition(kind).body if isinstance(step, ast.AnnAssign)]
    return {ast.unparse(step.target): _type_text(step.annotation, outside, records) or "object" for step in annotations}


def _class_definition(kind: type) -> ast.ClassDef:
    tree = tree_of(kind)
    assert isinstance(tree, ast.ClassDef)
    return tree


class Statement(NamedTuple):
    """A statement of an `__init__`: a template with `{}` for each value, and the texts of the values by slot."""

    text: str
    values: Mapping[str, str]


@dataclass(eq=False)
class Class:
    """A class of the file.

    Attributes:
        methods: the texts of its methods.
        filling: the statements that fill its tensors, at the end of its `__init__`.
        statements: the statements of its `__init__` that create attributes, tensors and children.
        values: for each module, the text of the value of each slot. A slot is a `{}` of a statement.
        arguments: the name of the argument for each slot whose value differs between modules.
    """

    name: str
    base: str
    docs: str
    methods: list[str]
    filling: list[str]
    statements: list[Statement] = field(default_factory=list)
    values: dict[nn.Module, dict[str, str]] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)

    def texts_of(self, module: nn.Module) -> dict[str, str]:
        """Return the texts of the arguments that create a module of this class."""
        return {name: self.values[module][slot] for slot, name in self.arguments.items()}

    def call(self, arguments: Mapping[str, str]) -> str:
        """Return the call with these argument texts."""
        parts = [CONFIG] * self.takes_config + [f"{name}={text}" for name, text in arguments.items()]
        return f"{self.name}({', '.join(parts)})"

    @property
    def takes_config(self) -> bool:
        """True if its `__init__` reads the config."""
        return any(CONFIG in variable_names(ast.parse(line)) for line in self.lines())

    def lines(self) -> list[str]:
        """Return the statements of its `__init__` that create attributes, tensors and children."""
        return [
            statement.text.format(*(self.arguments.get(slot, text) for slot, text in statement.values.items()))
            for statement in self.statements
        ]

    def source(self, config: ConfigClass) -> str:
        """Return the class as text."""
        parts = [f"{docs_text(self.docs)}\n"] if self.docs else []
        body = "\n\n".join([*self._init(config), *self.methods])
        return f"class {self.name}({self.base}):\n" + textwrap.indent("\n".join([*parts, body]), INDENT)

    def _init(self, config: ConfigClass) -> list[str]:
        """Return the `__init__`; empty if the `__init__` of the base class is enough."""
        lines = [*self.lines(), *self.filling]
        if not lines:
            return []
        arguments = list(map(self.texts_of, self.values))
        typed = [f"{name}: {_argument_type([texts[name] for texts in arguments], config)}" for name in arguments[0]]
        head = ", ".join(["self", *([f"{CONFIG}: Config"] if self.takes_config else []), *typed])
        steps = textwrap.indent("\n".join(["super().__init__()", *lines]), INDENT)
        return [f"def __init__({head}) -> None:\n{steps}"]


def _argument_type(texts: list[str], config: ConfigClass) -> str:
    """Return the type of an argument with these values."""
    if texts[0].startswith("nn."):
        return texts[0].partition("(")[0]
    values = map(config.value, texts)
    return " | ".join(sorted({"None" if value is None else type(value).__name__ for value in values}))

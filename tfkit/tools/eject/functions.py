"""Functions, records and constants as text."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from tfkit.plugin.docs import first_paragraph
from tfkit.tools.eject.tidy import reads
from tfkit.tools.eject.whole import Specialised, Whole

INDENT = "    "
DOCS = 104
"""Characters of a line of a docstring."""


def function_text(name: str, entry: Specialised, whole: Whole, *, method: bool) -> str:
    """A function or a method, with what is left of its arguments."""
    parameters = ["self"] * method + [_parameter(entry, one, whole) for one in entry.parameters]
    result = annotation(entry.code.tree.returns, entry, whole) or ("Tensor" if entry.code.fx else "")
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
    """Words that stand in a docstring, whatever they are."""
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
    """A type as it is written; empty where a name in it is not known."""
    if node is None:
        return ""
    parts: dict[str, str] = {}
    for name in reads(node):
        try:
            parts[name] = _type_name(entry.code.named(name), whole)
        except KeyError:
            return ""
    text = ast.unparse(_Renamed(parts).visit(ast.parse(ast.unparse(node), mode="eval")))
    return text.replace("torch.Tensor", "Tensor").replace("torch.torch", "torch")


def _type_name(value: Any, whole: Whole) -> str:
    if value in whole.records and (only := whole.alone(value)) is not None:
        return str(value.__annotations__[only]).replace("torch.Tensor", "Tensor")
    return "None" if value is type(None) else getattr(value, "__name__", str(value))


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(self.names[node.id])


def steps_text(steps: list[ast.stmt]) -> str:
    """Statements as text, tuples without brackets where a person writes none."""
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


def record_text(kind: type, fields: list[str]) -> str:
    """A `NamedTuple` with the fields that are left."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    lines = [f"class {kind.__name__}(NamedTuple):"]
    docs = ast.get_docstring(tree)
    if docs:
        lines += [textwrap.indent(docs_text(docs), INDENT), ""]
    for step in tree.body:
        if isinstance(step, ast.AnnAssign) and isinstance(step.target, ast.Name) and step.target.id in fields:
            lines.append(f"{INDENT}{step.target.id}: {ast.unparse(step.annotation)}")
    return "\n".join(lines)

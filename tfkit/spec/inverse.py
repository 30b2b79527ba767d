"""Arithmetic over one value of a spec that can be solved for it: `decoder.attention.mask.left + 1`.

A field of config.json is such an expression, written once: forward it is the field's value, and its inverse is the
spec's. All other names in it are fields.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cache

from tfkit.errors import Invalid, listing, quoted
from tfkit.spec.arithmetic import Number, apply, evaluate, parsed

Lookup = Callable[[str], Number]
UNKNOWN = "_"
_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


@dataclass(frozen=True)
class Expression:
    """An expression: the path of its value in the spec, and what is done to it; none for a bare path."""

    path: str
    steps: ast.expr | None = None

    @classmethod
    def parse(cls, text: str, fields: Container[str]) -> Expression:
        """The expression of a text, in which `fields` are numbers; raises `Invalid` if it has no inverse."""
        if _PATH.fullmatch(text):
            return cls(text)
        tree = _tree(text)
        names = [name for name in _names(tree) if name not in fields]
        if len(names) != 1:
            message = f"{quoted(text)} needs one path of the spec, and has {len(names) or 'none'}"
            notes = [listing(map(quoted, names))] if names else []
            raise Invalid("", message, notes=notes, help="every other name is a field of the family")
        expression = cls(names[0], tree)
        _solved(tree, names[0], lambda known: 3.0, 2.0)
        return expression

    @property
    def is_path(self) -> bool:
        """True if the value of the spec is that of the field."""
        return self.steps is None

    def forward(self, value: Number, number: Lookup) -> Number:
        """The field's value for the spec's."""
        assert self.steps is not None
        text = re.sub(rf"(?<![\w.]){re.escape(self.path)}(?![\w.])", UNKNOWN, ast.unparse(self.steps))
        return evaluate(text, lambda name: value if name == UNKNOWN else number(name))

    def inverse(self, value: Number, number: Lookup) -> Number:
        """The spec's value for the field's; raises `ExpressionError` where arithmetic ends."""
        assert self.steps is not None
        return _solved(self.steps, self.path, lambda known: evaluate(ast.unparse(known), number), value)


@cache
def _tree(text: str) -> ast.expr:
    return parsed(text)


def _names(tree: ast.AST) -> Iterator[str]:
    """The names in an expression, with dots."""
    name = ast.unparse(tree) if isinstance(tree, ast.Name | ast.Attribute) else ""
    if _PATH.fullmatch(name):
        yield name
        return
    for part in ast.iter_child_nodes(tree):
        yield from _names(part)


def _solved(tree: ast.expr, path: str, known: Callable[[ast.expr], Number], value: Number) -> Number:
    """The value at `path` for which the expression has that value."""
    if path not in _names(tree):
        raise AssertionError(path)
    if isinstance(tree, ast.Name | ast.Attribute):
        return value
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return _solved(tree.operand, path, known, -value)
    if isinstance(tree, ast.BinOp):
        left = path in _names(tree.left)
        inner, other = (tree.left, tree.right) if left else (tree.right, tree.left)
        if (inverse := _INVERSES.get((type(tree.op), left))) is not None:
            return _solved(inner, path, known, inverse(value, known(other)))
    help = "it may have + - * /, and // or ** with the path on the left"
    raise Invalid("", f"{quoted(ast.unparse(tree))} has no inverse", help=help)


def _power(value: Number, known: Number) -> Number:
    return apply(ast.Pow(), value, apply(ast.Div(), 1, known))


_INVERSES: dict[tuple[type[ast.operator], bool], Callable[[Number, Number], Number]] = {
    (ast.Add, True): lambda value, known: apply(ast.Sub(), value, known),
    (ast.Add, False): lambda value, known: apply(ast.Sub(), value, known),
    (ast.Sub, True): lambda value, known: apply(ast.Add(), value, known),
    (ast.Sub, False): lambda value, known: apply(ast.Sub(), known, value),
    (ast.Mult, True): lambda value, known: apply(ast.Div(), value, known),
    (ast.Mult, False): lambda value, known: apply(ast.Div(), value, known),
    (ast.Div, True): lambda value, known: apply(ast.Mult(), value, known),
    (ast.Div, False): lambda value, known: apply(ast.Div(), known, value),
    (ast.FloorDiv, True): lambda value, known: apply(ast.FloorDiv(), apply(ast.Mult(), value, known), 1),
    (ast.Pow, True): _power,
}
"""The inverse of an operator, by the side of the path; `//` rounds down in both directions."""

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
        """Parse an expression in which `fields` are numbers; raise `Invalid` if it has no inverse."""
        if _PATH.fullmatch(text):
            return cls(text)
        tree = _tree(text)
        names = [name for name in _names(tree) if name not in fields]
        if len(names) != 1:
            message = f"{quoted(text)} needs one path of the spec, and has {len(names) or 'none'}"
            notes = [listing(map(quoted, names))] if names else []
            raise Invalid("", message, notes=notes, help="every other name is a field of the family")
        expression = cls(names[0], tree)
        _solved(tree, names[0], lambda operand: 3.0, 2.0)
        return expression

    @property
    def is_path(self) -> bool:
        """True if the spec and the field have the same value."""
        return self.steps is None

    def forward(self, value: Number, number: Lookup) -> Number:
        """Return the field's value for the spec's."""
        assert self.steps is not None
        text = re.sub(rf"(?<![\w.]){re.escape(self.path)}(?![\w.])", UNKNOWN, ast.unparse(self.steps))
        return evaluate(text, lambda name: value if name == UNKNOWN else number(name))

    def inverse(self, value: Number, number: Lookup) -> Number:
        """Return the spec's value for the field's value; raise `ExpressionError` if it is undefined."""
        assert self.steps is not None
        return _solved(self.steps, self.path, lambda operand: evaluate(ast.unparse(operand), number), value)


@cache
def _tree(text: str) -> ast.expr:
    return parsed(text)


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield the names in an expression, with dots."""
    name = ast.unparse(tree) if isinstance(tree, ast.Name | ast.Attribute) else ""
    if _PATH.fullmatch(name):
        yield name
        return
    for part in ast.iter_child_nodes(tree):
        yield from _names(part)


def _solved(tree: ast.expr, path: str, number: Callable[[ast.expr], Number], value: Number) -> Number:
    """Return the value at `path` for which the expression has the given value."""
    if path not in _names(tree):
        raise AssertionError(path)
    if isinstance(tree, ast.Name | ast.Attribute):
        return value
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return _solved(tree.operand, path, number, -value)
    if isinstance(tree, ast.BinOp):
        left = path in _names(tree.left)
        inner, other = (tree.left, tree.right) if left else (tree.right, tree.left)
        if (inverse := _INVERSES.get((type(tree.op), left))) is not None:
            return _solved(inner, path, number, inverse(value, number(other)))
    help = "it may have + - * /, and // or ** with the path on the left"
    raise Invalid("", f"{quoted(ast.unparse(tree))} has no inverse", help=help)


def _power(value: Number, exponent: Number) -> Number:
    return apply(ast.Pow(), value, apply(ast.Div(), 1, exponent))


_INVERSES: dict[tuple[type[ast.operator], bool], Callable[[Number, Number], Number]] = {
    (ast.Add, True): lambda value, operand: apply(ast.Sub(), value, operand),
    (ast.Add, False): lambda value, operand: apply(ast.Sub(), value, operand),
    (ast.Sub, True): lambda value, operand: apply(ast.Add(), value, operand),
    (ast.Sub, False): lambda value, operand: apply(ast.Sub(), operand, value),
    (ast.Mult, True): lambda value, operand: apply(ast.Div(), value, operand),
    (ast.Mult, False): lambda value, operand: apply(ast.Div(), value, operand),
    (ast.Div, True): lambda value, operand: apply(ast.Mult(), value, operand),
    (ast.Div, False): lambda value, operand: apply(ast.Div(), operand, value),
    (ast.FloorDiv, True): lambda value, operand: apply(ast.FloorDiv(), apply(ast.Mult(), value, operand), 1),
    (ast.Pow, True): _power,
}
"""The inverse of an operator, by the side of the path; `//` rounds down in both directions."""

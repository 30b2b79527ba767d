"""Scalars as arithmetic over the spec's own fields: `d_head ** -0.5`, `(n_layers / 36) ** -0.5`.

The grammar is closed: numbers, names, + - * / // % **, parentheses. No calls, no attributes, no code.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cache

from tfkit.errors import Invalid, listing, quoted

MAX_LENGTH = 200
MAX_VALUE = 1e30
MAX_EXPONENT = 64
GRAMMAR = "arithmetic has numbers, names of the spec's fields, + - * / // % ** and parentheses"

VARIABLE = "_"
_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")

Number = int | float
Lookup = Callable[[str], Number]

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}


class ExpressionError(Invalid):
    """An error in an expression.

    `columns` is the invalid range of its text; `circle` holds the names that are computed from each other.
    """

    def __init__(self, message: str, *, notes: tuple[str, ...] = (), help: str | None = None) -> None:
        super().__init__("", message, notes=notes, help=help)
        self.columns: tuple[int, int] | None = None
        self.circle: tuple[str, ...] = ()


def evaluate(text: str, lookup: Lookup) -> Number:
    """Evaluate an expression; `lookup` returns the value of a name or raises `ExpressionError`."""
    return _located_value(parse_expression(text), lookup)


def parse_expression(text: str) -> ast.expr:
    """Parse an expression; raise `ExpressionError` if it is not a Python expression."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"an expression has at most {MAX_LENGTH} characters; this one has {len(text)}")
    try:
        with warnings.catch_warnings(action="ignore"):  # a SyntaxWarning for `4or 2`, which is rejected below
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ExpressionError(f"{quoted(text)} is neither a number nor arithmetic", help=GRAMMAR) from None
    return tree.body


def is_arithmetic(text: str) -> bool:
    """Return True if a text is a name, also with dots, or has an operator."""
    try:
        return isinstance(parse_expression(text), ast.Name | ast.Attribute | ast.BinOp | ast.UnaryOp)
    except ExpressionError:
        return False


def _located_value(node: ast.expr, lookup: Lookup) -> Number:
    """Evaluate a subexpression. Its errors contain its columns."""
    try:
        return _node_value(node, lookup)
    except ExpressionError as error:
        if error.columns is None:
            error.columns = node.col_offset, node.end_col_offset or node.col_offset + 1
        raise


def _node_value(node: ast.expr, lookup: Lookup) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded_value(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return lookup(node.id)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_located_value(node.operand, lookup))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return apply_operator(node.op, _located_value(node.left, lookup), _located_value(node.right, lookup))
    construct = {ast.Call: "a call", ast.Attribute: "a dot", ast.Constant: "text"}.get(type(node), "this")
    raise ExpressionError(f"{construct} cannot be in an expression", help=GRAMMAR)


def apply_operator(op: ast.operator, left: Number, right: Number) -> Number:
    """Apply an operator; raise `ExpressionError` where it is undefined."""
    if isinstance(op, ast.Pow) and abs(right) > MAX_EXPONENT:
        raise ExpressionError(f"a power of more than {MAX_EXPONENT}")
    try:
        value = _BINARY[type(op)](left, right)
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    except OverflowError:
        value = MAX_VALUE * 10
    if isinstance(value, complex):
        raise ExpressionError("a fractional power of a negative number has no real value")
    return _bounded_value(value)


def _bounded_value(value: Number) -> Number:
    if abs(value) > MAX_VALUE:
        raise ExpressionError("a number larger than any model needs")
    return value


# ---- expressions with an inverse ----
#
# A field of config.json is arithmetic over a single value of a spec, such as `decoder.attention.mask.left + 1`. The
# expression computes the field, and its inverse computes the spec's value. All other names in it are fields.


@dataclass(frozen=True)
class Expression:
    """An expression over one value of the spec: its path, and the syntax tree; None if the path is the expression."""

    path: str
    steps: ast.expr | None = None

    @classmethod
    def parse(cls, text: str, fields: Container[str]) -> Expression:
        """Parse an expression; names in `fields` are numbers. Raise `Invalid` if it has no inverse."""
        if _PATH.fullmatch(text):
            return cls(text)
        tree = _expression_tree(text)
        names = [name for name in _dotted_names(tree) if name not in fields]
        if len(names) != 1:
            message = f"{quoted(text)} must have exactly one path of the spec; got {len(names) or 'none'}"
            notes = [listing(map(quoted, names))] if names else []
            raise Invalid("", message, notes=notes, help="use fields of the family for all other names")
        expression = cls(names[0], tree)
        _solved_value(tree, names[0], lambda operand: 3.0, 2.0)
        return expression

    @property
    def is_path(self) -> bool:
        """True if the field equals the spec's value."""
        return self.steps is None

    def forward(self, value: Number, number: Lookup) -> Number:
        """Return the field's value for a value of the spec."""
        assert self.steps is not None
        text = re.sub(rf"(?<![\w.]){re.escape(self.path)}(?![\w.])", VARIABLE, ast.unparse(self.steps))
        return evaluate(text, lambda name: value if name == VARIABLE else number(name))

    def inverse(self, value: Number, number: Lookup) -> Number:
        """Return the spec's value for the field's value; raise `ExpressionError` if it is undefined."""
        assert self.steps is not None
        rounds = isinstance(self.steps, ast.BinOp) and isinstance(self.steps.op, ast.FloorDiv)
        if rounds and not float(value).is_integer():
            raise ExpressionError(f"the value must be an integer; got {value}")
        return _solved_value(self.steps, self.path, lambda operand: evaluate(ast.unparse(operand), number), value)


@cache
def _expression_tree(text: str) -> ast.expr:
    return parse_expression(text)


def _dotted_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names in an expression, with dots."""
    name = ast.unparse(tree) if isinstance(tree, ast.Name | ast.Attribute) else ""
    if _PATH.fullmatch(name):
        yield name
        return
    for part in ast.iter_child_nodes(tree):
        yield from _dotted_names(part)


def _solved_value(tree: ast.expr, path: str, number: Callable[[ast.expr], Number], value: Number) -> Number:
    """Return the value at `path` for which the expression has the given value."""
    if path not in _dotted_names(tree):
        raise AssertionError(path)
    if isinstance(tree, ast.Name | ast.Attribute):
        return value
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return _solved_value(tree.operand, path, number, -value)
    if isinstance(tree, ast.BinOp):
        left = path in _dotted_names(tree.left)
        unknown, operand = (tree.left, tree.right) if left else (tree.right, tree.left)
        if (inverse := _INVERSES.get((type(tree.op), left))) is not None:
            return _solved_value(unknown, path, number, inverse(value, number(operand)))
    help = "use only + - * /, and // or ** with the path on the left"
    raise Invalid("", f"{quoted(ast.unparse(tree))} has no inverse", help=help)


def _inverse_power(value: Number, exponent: Number) -> Number:
    return apply_operator(ast.Pow(), value, apply_operator(ast.Div(), 1, exponent))


_INVERSES: dict[tuple[type[ast.operator], bool], Callable[[Number, Number], Number]] = {
    (ast.Add, True): lambda value, operand: apply_operator(ast.Sub(), value, operand),
    (ast.Add, False): lambda value, operand: apply_operator(ast.Sub(), value, operand),
    (ast.Sub, True): lambda value, operand: apply_operator(ast.Add(), value, operand),
    (ast.Sub, False): lambda value, operand: apply_operator(ast.Sub(), operand, value),
    (ast.Mult, True): lambda value, operand: apply_operator(ast.Div(), value, operand),
    (ast.Mult, False): lambda value, operand: apply_operator(ast.Div(), value, operand),
    (ast.Div, True): lambda value, operand: apply_operator(ast.Mult(), value, operand),
    (ast.Div, False): lambda value, operand: apply_operator(ast.Div(), operand, value),
    (ast.FloorDiv, True): lambda value, operand: apply_operator(
        ast.FloorDiv(), apply_operator(ast.Mult(), value, operand), 1
    ),
    (ast.Pow, True): _inverse_power,
}
"""The inverse of an operator; the key is True if the path is its left operand. `//` rounds down in both directions."""

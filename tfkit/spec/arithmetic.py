"""Scalars as arithmetic over the spec's own fields: `d_head ** -0.5`, `(n_layers / 36) ** -0.5`.

The grammar is closed: numbers, names, + - * / // % **, parentheses. No calls, no attributes, no code.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable

from tfkit.errors import Invalid, quoted

MAX_LENGTH = 200
MAX_VALUE = 1e30
MAX_EXPONENT = 64
GRAMMAR = "arithmetic has numbers, names of the spec's fields, + - * / // % ** and parentheses"

Number = int | float

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

    `columns` is the range of its text at fault; `circle` holds the names that are computed from each other.
    """

    def __init__(self, message: str, *, notes: tuple[str, ...] = (), help: str | None = None) -> None:
        super().__init__("", message, notes=notes, help=help)
        self.columns: tuple[int, int] | None = None
        self.circle: tuple[str, ...] = ()


def evaluate(text: str, lookup: Callable[[str], Number]) -> Number:
    """Evaluate an expression; `lookup` returns the value of a name or raises `ExpressionError`."""
    return _value(parsed(text), lookup)


def parsed(text: str) -> ast.expr:
    """Parse an expression; raise `ExpressionError` if it is not a Python expression."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"an expression has at most {MAX_LENGTH} characters; this one has {len(text)}")
    try:
        with warnings.catch_warnings(action="ignore"):  # of `4or 2`, which is refused below
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ExpressionError(f"{quoted(text)} is neither a number nor arithmetic", help=GRAMMAR) from None
    return tree.body


def _value(node: ast.expr, lookup: Callable[[str], Number]) -> Number:
    """Evaluate an operand or operator. An error in it carries its columns."""
    try:
        return _part(node, lookup)
    except ExpressionError as error:
        if error.columns is None:
            error.columns = node.col_offset, node.end_col_offset or node.col_offset + 1
        raise


def _part(node: ast.expr, lookup: Callable[[str], Number]) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return lookup(node.id)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, lookup))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return apply(node.op, _value(node.left, lookup), _value(node.right, lookup))
    what = {ast.Call: "a call", ast.Attribute: "a dot", ast.Constant: "text"}.get(type(node), "this")
    raise ExpressionError(f"{what} cannot be in an expression", help=GRAMMAR)


def apply(op: ast.operator, left: Number, right: Number) -> Number:
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
    return _bounded(value)


def _bounded(value: Number) -> Number:
    if abs(value) > MAX_VALUE:
        raise ExpressionError("a number larger than any model needs")
    return value

"""Scalars as arithmetic over the spec's own fields: `d_head ** -0.5`, `(n_layers / 36) ** -0.5`.

The grammar is closed: numbers, names, + - * / // % **, parentheses. No calls, no attributes, no code.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from tfkit.errors import quoted

MAX_LENGTH = 200
MAX_VALUE = 1e30

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


class ExpressionError(ValueError):
    """What is wrong with an expression, in words for the user."""


def evaluate(text: str, lookup: Callable[[str], Number]) -> Number:
    """The value of the expression; `lookup` gives the value of a name, or raises `ExpressionError`."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"an expression has at most {MAX_LENGTH} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ExpressionError(f"{quoted(text)} is neither a number nor arithmetic over the spec's fields") from None
    value = _value(tree.body, lookup)
    if abs(value) > MAX_VALUE:
        raise ExpressionError(f"{quoted(text)} is larger than any size of a model")
    return value


def _value(node: ast.expr, lookup: Callable[[str], Number]) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.Name):
        return lookup(node.id)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, lookup))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left, lookup), _value(node.right, lookup)
        return _apply(node.op, left, right)
    raise ExpressionError("only numbers, names, + - * / // % ** and parentheses can stand in an expression")


def _apply(op: ast.operator, left: Number, right: Number) -> Number:
    if isinstance(op, ast.Pow) and (abs(left) > MAX_VALUE or abs(right) > 64):
        raise ExpressionError("the power is too large for any size of a model")
    try:
        value = _BINARY[type(op)](left, right)
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    except OverflowError:
        raise ExpressionError("the result is too large for any size of a model") from None
    if isinstance(value, complex):
        raise ExpressionError("a fractional power of a negative number has no real value")
    if abs(value) > MAX_VALUE:
        raise ExpressionError("the result is too large for any size of a model")
    return value

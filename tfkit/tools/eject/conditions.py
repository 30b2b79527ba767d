"""Operators and conditions: their values, and the facts that a test proves about the variables in it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from enum import Enum
from typing import Any

from tfkit.tools.eject.symbols import Named, text_of
from tfkit.tools.eject.values import NONE, SOME, Known, Value, is_constant, join, may_be_none, truth

Written = tuple[Value, ast.expr]
"""The value of an expression, as far as it is known, and its text as a tree."""


class Conditions:
    """Evaluates operators; `env` has the values of the variables, as far as they are known."""

    env: dict[str, Value]

    def eval(self, node: ast.expr) -> Written:
        """Return an expression, by the method that has the name of its class."""
        evaluate: Callable[[Any], Written] = getattr(self, f"_{type(node).__name__.lower()}", self._any)
        value, written = evaluate(node)
        if is_constant(value) and not isinstance(node, ast.Constant):
            return value, ast.Constant(value.value)
        return value, written

    def written(self, node: ast.expr) -> ast.expr:
        """Return the text of an expression, as a tree."""
        return self.eval(node)[1]

    def _any(self, node: ast.expr) -> Written:
        """Return an expression of which only its parts are known, and that it is not None."""
        return SOME, type(node)(**{name: self._part(value) for name, value in ast.iter_fields(node)})

    def _part(self, part: Any) -> Any:
        if isinstance(part, list):
            return [self._part(item) for item in part]
        return self.written(part) if isinstance(part, ast.expr) else part

    def _compare(self, node: ast.Compare) -> Written:
        left, left_written = self.eval(node.left)
        operands = [self.eval(operand) for operand in node.comparators]
        comparison = ast.Compare(left_written, node.ops, [written for _, written in operands])
        right = operands[0][0]
        if len(operands) > 1:
            return SOME, comparison
        if isinstance(node.ops[0], ast.Is | ast.IsNot) and isinstance(right, Known) and right.value is None:
            if isinstance(left, Known):
                return _truth((left.value is None) == isinstance(node.ops[0], ast.Is)), comparison
            return (SOME if may_be_none(left) else _truth(isinstance(node.ops[0], ast.IsNot))), comparison
        if isinstance(left, Known) and isinstance(right, Known) and isinstance(left.value, Enum):
            if isinstance(node.ops[0], ast.Is | ast.IsNot | ast.Eq | ast.NotEq):
                return _truth((left.value is right.value) == isinstance(node.ops[0], ast.Is | ast.Eq)), comparison
        elif (
            isinstance(left, Known) and isinstance(right, Known) and _is_number(left.value) and _is_number(right.value)
        ):
            return _truth(_evaluated(ast.Compare(literal(left.value), node.ops, [literal(right.value)]))), comparison
        return SOME, comparison

    def _unaryop(self, node: ast.UnaryOp) -> Written:
        value, written = self.eval(node.operand)
        outcome = truth(value) if isinstance(node.op, ast.Not) else None
        return (SOME if outcome is None else _truth(not outcome)), ast.UnaryOp(node.op, written)

    def _binop(self, node: ast.BinOp) -> Written:
        left, left_written = self.eval(node.left)
        right, right_written = self.eval(node.right)
        operation = ast.BinOp(left_written, node.op, right_written)
        if is_constant(left) and is_constant(right):
            return Known(
                _evaluated(ast.BinOp(literal(left.value), node.op, literal(right.value))), literal=True
            ), operation
        if isinstance(node.op, ast.Add | ast.Sub) and right == Known(0, literal=True):
            return left, left_written
        return SOME, operation

    def _boolop(self, node: ast.BoolOp) -> Written:
        """Drop the parts whose truth is known, or return the one that decides."""
        decides = isinstance(node.op, ast.Or)
        left: list[Written] = []
        saved = self.env
        for operand in node.values:
            value, written = self.eval(operand)
            outcome = truth(value)
            if outcome is decides and isinstance(value, Known) and isinstance(value.value, bool):
                left = [(value, ast.Constant(value.value))]  # the parts before it have no effect but their value
                break
            if outcome is not (not decides):
                left.append((value, written))
            if outcome is decides:
                break
            self.narrow(operand, not decides)
        self.env = saved
        if len(left) > 1:
            return SOME, ast.BoolOp(node.op, [written for _, written in left])
        return left[0] if left else (_truth(not decides), ast.Constant(not decides))

    def _ifexp(self, node: ast.IfExp) -> Written:
        test, test_written = self.eval(node.test)
        if (outcome := truth(test)) is not None:
            return self.eval(node.body if outcome else node.orelse)
        saved = self.env
        self.narrow(node.test, True)
        body, body_written = self.eval(node.body)
        self.env = saved
        self.narrow(node.test, False)
        orelse, orelse_written = self.eval(node.orelse)
        self.env = saved
        if isinstance(body, Known) and isinstance(orelse, Known) and body.value == orelse.value is not None:
            return Known(orelse.value, literal=body.literal or orelse.literal), orelse_written
        return join(body, orelse), ast.IfExp(test_written, body_written, orelse_written)

    def narrow(self, test: ast.expr, holds: bool) -> None:
        """Note in `env`, a new one, that a test holds, or does not: some variables are then None, or are not."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == holds:
            for part in test.values:
                self.narrow(part, holds)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.narrow(test.operand, not holds)
        elif isinstance(test, ast.Compare) and isinstance(name := test.left, ast.Name):
            none = isinstance(right := test.comparators[0], ast.Constant) and right.value is None
            if none and isinstance(test.ops[0], ast.Is | ast.IsNot) and type(self.env.get(name.id)) is Value:
                self.env = self.env | {name.id: NONE if isinstance(test.ops[0], ast.Is) == holds else SOME}


def _truth(value: bool) -> Known:
    return Known(value, literal=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | str)


def _evaluated(node: ast.expr) -> Any:
    """Return the value of an expression of literals."""
    return eval(compile(ast.fix_missing_locations(ast.Expression(node)), "<literals>", "eval"))


def literal(value: Any) -> ast.expr:
    """Return a value as an expression. Raise NotImplementedError if there is none."""
    return ast.parse(repr(value) if isinstance(value, Named) else text_of(value), mode="eval").body

"""Operators and conditions: their values, and the facts that a test proves about the variables in it."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from tfkit.tools.eject.values import NONE, SOME, Known, Value, join, may_be_none, truth

Written = tuple[Value, ast.expr]


class Conditions(ABC):
    """Evaluates operators; `env` has the values of the variables, as far as they are known."""

    env: dict[str, Value]

    @abstractmethod
    def eval(self, node: ast.expr) -> Written:
        """The value of an expression, as far as it is known, and its text as a tree."""

    def _compare(self, node: ast.Compare) -> Written:
        left, left_written = self.eval(node.left)
        found = [self.eval(one) for one in node.comparators]
        made = ast.Compare(left_written, node.ops, [written for _, written in found])
        right = found[0][0]
        if len(found) > 1:
            return SOME, made
        if isinstance(node.ops[0], ast.Is | ast.IsNot) and isinstance(right, Known) and right.value is None:
            if isinstance(left, Known):
                return _truth((left.value is None) == isinstance(node.ops[0], ast.Is)), made
            return (SOME if may_be_none(left) else _truth(isinstance(node.ops[0], ast.IsNot))), made
        if isinstance(left, Known) and isinstance(right, Known) and _is_number(left.value) and _is_number(right.value):
            return _truth(_evaluated(ast.Compare(literal(left.value), node.ops, [literal(right.value)]))), made
        return SOME, made

    def _unaryop(self, node: ast.UnaryOp) -> Written:
        value, written = self.eval(node.operand)
        made = ast.UnaryOp(node.op, written)
        if isinstance(node.op, ast.Not) and (known := truth(value)) is not None:
            return _truth(not known), made
        return SOME, made

    def _binop(self, node: ast.BinOp) -> Written:
        left, left_written = self.eval(node.left)
        right, right_written = self.eval(node.right)
        made = ast.BinOp(left_written, node.op, right_written)
        if isinstance(left, Known) and isinstance(right, Known) and left.literal and right.literal:
            return Known(_evaluated(ast.BinOp(literal(left.value), node.op, literal(right.value))), literal=True), made
        if isinstance(node.op, ast.Add | ast.Sub) and right == Known(0, literal=True):
            return left, left_written
        return SOME, made

    def _boolop(self, node: ast.BoolOp) -> Written:
        """Drop the parts whose truth is known, or return the one that decides."""
        decides = isinstance(node.op, ast.Or)
        left: list[Written] = []
        saved = self.env
        for operand in node.values:
            value, written = self.eval(operand)
            known = truth(value)
            if known is decides and isinstance(value, Known) and isinstance(value.value, bool):
                left = [(value, ast.Constant(value.value))]  # the parts before it have no effect but their value
                break
            if known is not (not decides):
                left.append((value, written))
            if known is decides:
                break
            self.env = self.narrowed(operand, not decides)
        self.env = saved
        if len(left) > 1:
            return SOME, ast.BoolOp(node.op, [written for _, written in left])
        return left[0] if left else (_truth(not decides), ast.Constant(not decides))

    def _ifexp(self, node: ast.IfExp) -> Written:
        test, test_written = self.eval(node.test)
        if (known := truth(test)) is not None:
            return self.eval(node.body if known else node.orelse)
        saved = self.env
        self.env = self.narrowed(node.test, True)
        body, body_written = self.eval(node.body)
        self.env = {**saved, **self.narrowed(node.test, False, saved)}
        orelse, orelse_written = self.eval(node.orelse)
        self.env = saved
        if (
            isinstance(body, Known)
            and isinstance(orelse, Known)
            and body.value == orelse.value
            and body.value is not None
        ):
            return Known(orelse.value, literal=body.literal or orelse.literal), orelse_written
        return join(body, orelse), ast.IfExp(test_written, body_written, orelse_written)

    def narrowed(self, test: ast.expr, holds: bool, env: Mapping[str, Value] | None = None) -> dict[str, Value]:
        """The variables as they are known if a test holds, or does not: some of them are then not None."""
        env = dict(self.env if env is None else env)
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == holds:
            for part in test.values:
                env = self.narrowed(part, holds, env)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.narrowed(test.operand, not holds, env)
        elif isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id in env:
            none = isinstance(right := test.comparators[0], ast.Constant) and right.value is None
            if none and isinstance(test.ops[0], ast.Is | ast.IsNot) and type(env[test.left.id]) is Value:
                env[test.left.id] = NONE if isinstance(test.ops[0], ast.Is) == holds else SOME
        return env


def _truth(value: bool) -> Known:
    return Known(value, literal=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | str)


def _evaluated(node: ast.expr) -> Any:
    """The value of an expression of literals."""
    return eval(compile(ast.fix_missing_locations(ast.Expression(node)), "<literals>", "eval"))


def literal(value: Any) -> ast.expr:
    """A value as a literal."""
    return ast.parse(repr(value), mode="eval").body

"""Partial evaluation of expressions: their values, as far as they are known, and their rewritten syntax trees.

An expression that cannot be evaluated stays as written, with its parts evaluated.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

import tfkit.nn
from tfkit.tools.eject.cleanup import variable_names
from tfkit.tools.eject.config import Named
from tfkit.tools.eject.patterns import set_pattern
from tfkit.tools.eject.source import Code, is_library
from tfkit.tools.eject.torch_modules import STANDS_FOR
from tfkit.tools.eject.values import (
    ANY_VALUE,
    NONE,
    SOME_VALUE,
    AbstractValue,
    ConcreteValue,
    Items,
    Maybe,
    Method,
    Modules,
    Records,
    RecordValue,
    fields_of,
    is_constant,
    join,
    join_all,
    may_be_none,
    truth_value,
    without_none,
)

Node = TypeVar("Node", bound=ast.AST)
Written = tuple[AbstractValue, ast.expr]
"""The value of an expression, as far as it is known, and its rewritten syntax tree."""


class Expressions:
    """Evaluates the expressions of a function, except calls.

    Attributes:
        module: the module, if the function is a method.
        code: the source, in which calls of rearrangements are expanded.
        self_name: the name of the module in the source.
        records: the named tuples of the model.
        read: the attributes of each module that other modules use.
        env: the values of the variables, as far as they are known.
        uses: the global names that the function uses, with their objects.
    """

    def __init__(self, module: nn.Module | None, code: Code, records: Records, read: dict[nn.Module, set[str]]) -> None:
        self.module = module
        self.code = code
        self.self_name = code.tree.args.args[0].arg if module is not None else None
        self.records = records
        self.read = read
        self.env: dict[str, AbstractValue] = {}
        self.uses: dict[str, Any] = {}

    def eval(self, node: ast.expr) -> Written:
        """Evaluate an expression by the method for its class."""
        evaluate: Callable[[Any], Written] = getattr(self, f"_{type(node).__name__.lower()}", self._any)
        value, written = evaluate(node)
        if hasattr(node, "pattern"):
            set_pattern(written, node.pattern)
        if is_constant(value) and not isinstance(node, ast.Constant):
            return value, ast.Constant(value.value)
        return value, written

    def written(self, node: ast.expr) -> ast.expr:
        """Return the rewritten syntax tree of an expression."""
        return self.eval(node)[1]

    def _any(self, node: ast.expr) -> Written:
        """Return an expression with evaluated parts and an unknown value that is not None."""
        return SOME_VALUE, self.rewritten(node)

    def rewritten(self, node: Node) -> Node:
        """Return an expression or a statement with evaluated parts."""
        return type(node)(**{name: self._part(value) for name, value in ast.iter_fields(node)})

    def _part(self, part: Any) -> Any:
        if isinstance(part, list):
            return [self._part(item) for item in part]
        return self.written(part) if isinstance(part, ast.expr) else part

    def _lambda(self, node: ast.Lambda) -> Written:
        raise NotImplementedError("a `lambda`")

    def _constant(self, node: ast.Constant) -> Written:
        return ConcreteValue(node.value, literal=True), node

    def _name(self, node: ast.Name) -> Written:
        if node.id == self.self_name:
            assert self.module is not None
            return Modules((self.module,)), node
        if node.id in self.env:
            return self.env[node.id], ast.Name(node.id)
        if node.id not in self.code.names:
            raise NotImplementedError(f"nothing says what `{node.id}` is")
        return self._global(node.id, self.code.names[node.id])

    def _global(self, name: str, value: Any) -> Written:
        """Return a global object, and its name in the file."""
        value = F.linear if value is tfkit.nn.linear else value  # both compute the same
        value = STANDS_FOR.get(value, value) if isinstance(value, type) else value
        if hasattr(value, "cache_clear"):  # a cached function of functools: the file calls it only once
            value = inspect.unwrap(value)
        return ConcreteValue(value), self.use(name, value)

    def replaced(self, value: Any) -> Any:
        """Return the replacement of a global object; by default the object."""
        return value

    def use(self, name: str, value: Any) -> ast.expr:
        """Record the use of a global object, which has a single name in the file."""
        if value is F.linear:
            return ast.Attribute(self.use("F", F), "linear")
        if value in STANDS_FOR.values():
            return ast.Attribute(self.use("nn", nn), value.__name__)
        if (isinstance(value, type) and value.__module__ == "builtins") or name in ("range", "len", "enumerate", "zip"):
            return ast.Name(name)
        name = getattr(value, "__name__", name) if isinstance(value, FunctionType | type) else name
        name = {torch: "torch", nn: "nn", F: "F"}.get(value, name) if isinstance(value, ModuleType) else name
        self.uses[name] = value
        return ast.Name(name)

    def _attribute(self, node: ast.Attribute) -> Written:
        base, written = self.eval(node.value)
        base, attribute = without_none(base), ast.Attribute(written, node.attr)
        if isinstance(base, Modules):
            if not (isinstance(node.value, ast.Name) and node.value.id == self.self_name):
                for module in base.modules:
                    self.read.setdefault(module, set()).add(node.attr)
            return join_all(_attribute_of(module, node.attr) for module in base.modules), attribute
        if isinstance(base, RecordValue) and base.type is not None and node.attr in fields_of(base.type):
            value = base.items[fields_of(base.type).index(node.attr)]
            return value, written if self.records.alone(base.type) == node.attr else attribute
        if not isinstance(base, ConcreteValue):
            return SOME_VALUE, attribute
        value = self.replaced(getattr(base.value, node.attr))
        # The file defines the function, so it is called by its name alone: `update_cache`.
        is_defined = isinstance(base.value, ModuleType) and not is_library(value)
        return self._global(node.attr, value) if is_defined else (ConcreteValue(value), attribute)

    def _joinedstr(self, node: ast.JoinedStr) -> Written:
        value, written = self._any(node)
        return value, written if variable_names(written) else ast.Constant(eval(ast.unparse(written)))

    def _subscript(self, node: ast.Subscript) -> Written:
        base, written = self.eval(node.value)
        base = without_none(base)
        index, index_written = self.eval(node.slice)
        value: AbstractValue = SOME_VALUE
        if isinstance(base, RecordValue) and isinstance(index, ConcreteValue) and isinstance(index.value, int):
            value = base.items[index.value]
        elif isinstance(base, Items):
            value = base.item or SOME_VALUE
        elif isinstance(base, Modules):
            value = Items(items_of(base)) if isinstance(node.slice, ast.Slice) else items_of(base)
        elif isinstance(base, ConcreteValue):
            items = [ConcreteValue(item) for item in base.value] if isinstance(base.value, list | tuple) else []
            equal = len(items) > 0 and isinstance(items[0].value, int) and items.count(items[0]) == len(items)
            value = ConcreteValue(items[0].value, literal=True) if equal else ANY_VALUE
        return value, ast.Subscript(written, index_written)

    def _tuple(self, node: ast.Tuple) -> Written:
        items = [self.eval(element) for element in node.elts]
        starred = any(isinstance(element, ast.Starred) for element in node.elts)
        value = SOME_VALUE if starred else RecordValue(None, tuple(value for value, _ in items))
        return value, ast.Tuple([written for _, written in items])

    def _list(self, node: ast.List) -> Written:
        items = [self.eval(element) for element in node.elts]
        item = join_all(value for value, _ in items) if items else None
        return Items(item), ast.List([written for _, written in items])

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp) -> Written:
        saved = dict(self.env)
        generators = []
        for generator in node.generators:
            value, iterable = self.eval(generator.iter)
            self.bind(generator.target, item_of(value))
            conditions = list(map(self.written, generator.ifs))
            generators.append(ast.comprehension(generator.target, iterable, conditions, generator.is_async))
        value, written = self.eval(node.elt)
        self.env = saved
        return Items(value), type(node)(written, generators)

    _generatorexp = _listcomp

    def bind(self, target: ast.expr, value: AbstractValue) -> None:
        """Assign a value to the names of a target."""
        if isinstance(target, ast.Name):
            self.env[target.id] = value
        elif isinstance(target, ast.Tuple):
            value = without_none(value)
            parts = value.items if isinstance(value, RecordValue) and len(value.items) == len(target.elts) else None
            item = item_of(value) if isinstance(value, Items) else SOME_VALUE
            for index, element in enumerate(target.elts):
                self.bind(element, parts[index] if parts else item)

    def _compare(self, node: ast.Compare) -> Written:
        left, left_written = self.eval(node.left)
        operands = [self.eval(operand) for operand in node.comparators]
        right, *more = [value for value, _ in operands]
        value: AbstractValue = SOME_VALUE
        if isinstance(node.ops[0], ast.Is | ast.IsNot) and isinstance(right, ConcreteValue) and right.value is None:
            if isinstance(left, ConcreteValue):
                value = _boolean_literal((left.value is None) == isinstance(node.ops[0], ast.Is))
            elif not may_be_none(left):
                value = _boolean_literal(isinstance(node.ops[0], ast.IsNot))
        elif (
            isinstance(left, ConcreteValue)
            and isinstance(right, ConcreteValue)
            and all(map(_is_number, (left.value, right.value)))
        ):
            value = _boolean_literal(
                _operation_result(ast.Compare(_LEFT_NAME, node.ops[:1], [_RIGHT_NAME]), left, right)
            )
        return SOME_VALUE if more else value, ast.Compare(left_written, node.ops, [written for _, written in operands])

    def _unaryop(self, node: ast.UnaryOp) -> Written:
        value, written = self.eval(node.operand)
        outcome = truth_value(value) if isinstance(node.op, ast.Not) else None
        return (SOME_VALUE if outcome is None else _boolean_literal(not outcome)), ast.UnaryOp(node.op, written)

    def _binop(self, node: ast.BinOp) -> Written:
        left, left_written = self.eval(node.left)
        right, right_written = self.eval(node.right)
        if isinstance(node.op, ast.Add | ast.Sub) and right == ConcreteValue(0, literal=True):
            return left, left_written
        value: AbstractValue = SOME_VALUE
        if is_constant(left) and is_constant(right):
            value = ConcreteValue(
                _operation_result(ast.BinOp(_LEFT_NAME, node.op, _RIGHT_NAME), left, right), literal=True
            )
        return value, ast.BinOp(left_written, node.op, right_written)

    def _boolop(self, node: ast.BoolOp) -> Written:
        """Remove operands whose truth is known, or return the operand that decides."""
        decides = isinstance(node.op, ast.Or)
        left: list[Written] = []
        saved = self.env
        for operand in node.values:
            value, written = self.eval(operand)
            outcome = truth_value(value)
            if outcome is decides and isinstance(value, ConcreteValue) and isinstance(value.value, bool):
                left = [(value, ast.Constant(value.value))]  # the parts before it have no effect but their value
                break
            if outcome is not (not decides):
                left.append((value, written))
            if outcome is decides:
                break
            self.narrow(operand, not decides)
        self.env = saved
        if len(left) > 1:
            return SOME_VALUE, ast.BoolOp(node.op, [written for _, written in left])
        return left[0] if left else (_boolean_literal(not decides), ast.Constant(not decides))

    def _ifexp(self, node: ast.IfExp) -> Written:
        test, test_written = self.eval(node.test)
        if (outcome := truth_value(test)) is not None:
            return self.eval(node.body if outcome else node.orelse)
        saved = self.env
        self.narrow(node.test, True)
        body, body_written = self.eval(node.body)
        self.env = saved
        self.narrow(node.test, False)
        orelse, orelse_written = self.eval(node.orelse)
        self.env = saved
        if (
            isinstance(body, ConcreteValue)
            and isinstance(orelse, ConcreteValue)
            and body.value == orelse.value is not None
        ):
            return ConcreteValue(orelse.value, literal=body.literal or orelse.literal), orelse_written
        return join(body, orelse), ast.IfExp(test_written, body_written, orelse_written)

    def narrow(self, test: ast.expr, holds: bool) -> None:
        """Replace `env` by a copy in which a test holds or does not, so some variables are None or not None."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == holds:
            for part in test.values:
                self.narrow(part, holds)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.narrow(test.operand, not holds)
        elif isinstance(test, ast.Compare) and isinstance(name := test.left, ast.Name):
            none = isinstance(right := test.comparators[0], ast.Constant) and right.value is None
            value = self.env.get(name.id)
            is_open = type(value) is AbstractValue or isinstance(value, Maybe)
            if none and isinstance(test.ops[0], ast.Is | ast.IsNot) and value is not None and is_open:
                self.env = self.env | {
                    name.id: NONE if isinstance(test.ops[0], ast.Is) == holds else without_none(value)
                }


def _attribute_of(module: nn.Module, name: str) -> AbstractValue:
    if name == "training":
        return SOME_VALUE
    if name not in module.__dict__ and isinstance(getattr(type(module), name, None), FunctionType):
        return Method((module,), name)
    value = getattr(module, name)
    if isinstance(value, nn.Module):
        return Modules((value,))
    if isinstance(value, torch.Tensor):
        return SOME_VALUE
    # 0 and 1 get no names: they are switches, like True and False.
    switch = isinstance(value, int) and not isinstance(value, Named) and value in (0, 1)
    return ConcreteValue(value, literal=value is None or isinstance(value, bool) or switch)


def items_of(container: Modules) -> AbstractValue:
    """Return the items of containers: modules, or the tensors of containers of parameters."""
    children = tuple(dict.fromkeys(child for module in container.modules for child in module.children()))
    return Modules(children) if children else SOME_VALUE


def item_of(value: AbstractValue) -> AbstractValue:
    """Return the value of the variable in a loop over `value`."""
    value = without_none(value)
    if isinstance(value, Modules):
        return items_of(value)
    if isinstance(value, Items):
        return value.item or SOME_VALUE
    return join_all(value.items) if isinstance(value, RecordValue) and value.items else SOME_VALUE


def _boolean_literal(value: bool) -> ConcreteValue:
    return ConcreteValue(value, literal=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | str)


_LEFT_NAME, _RIGHT_NAME = ast.Name("left"), ast.Name("right")


def _operation_result(operation: ast.expr, left: ConcreteValue, right: ConcreteValue) -> Any:
    """Return the result of an operation on `left` and `right`."""
    return eval(ast.unparse(operation), {"left": left.value, "right": right.value})

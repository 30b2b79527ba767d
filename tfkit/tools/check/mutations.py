"""Small bugs as changes of a syntax tree: a sign, an axis, an edge, a missing scale, arguments in the wrong order."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import singledispatch
from types import ModuleType
from typing import Any, TypeAlias

DISPLAYED = 34
"""Characters of the longest expression that is displayed around a change."""
OPERATORS: Mapping[type[ast.AST], tuple[str, type[Any]]] = {
    ast.Add: ("sign", ast.Sub),
    ast.Sub: ("sign", ast.Add),
    ast.Mult: ("scale", ast.Div),
    ast.Div: ("scale", ast.Mult),
    ast.BitAnd: ("condition", ast.BitOr),
    ast.BitOr: ("condition", ast.BitAnd),
    ast.And: ("condition", ast.Or),
    ast.Or: ("condition", ast.And),
    ast.Eq: ("condition", ast.NotEq),
    ast.NotEq: ("condition", ast.Eq),
    ast.Lt: ("edge", ast.LtE),
    ast.LtE: ("edge", ast.Lt),
    ast.Gt: ("edge", ast.GtE),
    ast.GtE: ("edge", ast.Gt),
}
"""The operator that replaces an operator, and the type of this bug."""
PAIRS = (
    "sin cos, max min, amax amin, maximum minimum, sum mean, triu tril, zeros ones, zeros_like ones_like, argmax argmin"
)
FUNCTIONS = {a: b for pair in PAIRS.split(", ") for a, b in (pair.split(), reversed(pair.split()))}
"""The function that replaces a function with equal arguments."""
AXES = ("dim", "dims", "axis")
"""Keywords that name an axis."""
AXIS_FIRST = re.compile(
    "all|any|amax|amin|argmax|argmin|cumprod|cumsum|flip|logsumexp|max|mean|min|prod|select|size|softmax|squeeze|sum"
    "|transpose|unsqueeze"
)
"""Methods whose first argument is an axis."""
SIZES = ("dim", "item", "numel", "size")
"""Methods of a tensor whose results are no tensors."""
OMITTED = ("abs", "reversed", "round", "sorted")
"""Functions of Python that return a value like their argument."""
UNORDERED = ("getattr", "hasattr", "isinstance", "issubclass", "make", "zip")
"""Functions whose arguments are not exchanged: the result would be an error, or equal."""
WITHOUT_NUMBERS = re.compile(r"check|check_\w+|extra_repr|__repr__|__str__")
"""Functions that compute no number: checks of a config, and texts."""
GROUP = re.compile(r"\((\w+) (\w+)\)")
OUTPUT = re.compile(r"(->\s*\w*)(\w)(\w)\s*$")

Names: TypeAlias = Mapping[str, Any]
"""The values of the global names of a module."""
Edit: TypeAlias = tuple[str, ast.AST]
"""The type of a bug, and the node that replaces a node."""


@dataclass(frozen=True, eq=False)
class Mutation:
    """A change of one place in a function.

    Attributes:
        type: the type of the bug, such as `sign` or `axis`.
        line: the line of the change.
        span: the first line and column, and the last line and column, of the narrowest instructions around the change.
        function: the name and the first line of the innermost function around the change.
        before: the changed expression.
        after: the expression after the change.
    """

    type: str
    line: int
    span: tuple[int, int, int, int]
    function: tuple[str, int]
    before: str
    after: str
    _slot: _Slot
    _node: ast.AST

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Change the syntax tree within the context."""
        with self._slot.holding(self._node):
            yield


@dataclass(frozen=True)
class _Slot:
    """A field of a node or an entry of a list of nodes, and the expressions around it, outermost first."""

    container: Any
    key: Any
    parent: ast.AST
    around: tuple[ast.expr, ...] = ()

    @property
    def node(self) -> Any:
        """The node in the slot."""
        return self.container[self.key]

    @contextmanager
    def holding(self, node: ast.AST) -> Iterator[None]:
        """Replace the node within the context."""
        before = self.node
        self.container[self.key] = node
        try:
            yield
        finally:
            self.container[self.key] = before


def mutations(tree: ast.Module, names: Names) -> Iterator[Mutation]:
    """Yield small bugs in the functions of a module. They all end: a loop with `while` is left unchanged."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and not WITHOUT_NUMBERS.fullmatch(function.name):
            first = min([function.lineno, *(part.lineno for part in function.decorator_list)])
            for slot in _slots_of_body(function, function.body):
                seen = {ast.dump(slot.node)}
                for kind, node in edits(slot.node, slot.parent, names):
                    if ast.dump(node) not in seen:
                        seen.add(ast.dump(node))
                        yield _described(slot, kind, node, (function.name, first))


def _described(slot: _Slot, kind: str, node: ast.AST, function: tuple[str, int]) -> Mutation:
    """Return a mutation, with the longest expression around it that can be displayed."""
    for part in ast.walk(node):
        if "lineno" in part._attributes and not hasattr(part, "lineno"):
            ast.copy_location(part, slot.node)
    ast.fix_missing_locations(node)
    displayed = next((part for part in slot.around if len(ast.unparse(part)) <= DISPLAYED), None)
    before = ast.unparse(displayed or slot.node)
    with slot.holding(node):
        after = ast.unparse(displayed or node)
    return Mutation(kind, slot.node.lineno, _span(slot), function, before, after, slot, node)


def _span(slot: _Slot) -> tuple[int, int, int, int]:
    """Return the span of a node, or of the narrowest expression around it that has an instruction."""
    inert = ast.Constant, ast.Slice, ast.Tuple, ast.UnaryOp, ast.expr_context, ast.unaryop
    node: Any = slot.node
    for node in (slot.node, *reversed(slot.around), slot.parent):
        if not all(isinstance(part, inert) for part in ast.walk(node)):
            break
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


# ---- places that compute something ----


def _slots_of_body(owner: ast.AST, body: list[ast.stmt]) -> Iterator[_Slot]:
    """Yield the statements and expressions of a body, without nested functions, errors and messages."""
    for index, statement in enumerate(body):
        if not isinstance(
            statement,
            ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return | ast.If | ast.For | ast.With | ast.Try,
        ):
            continue
        inner = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
        if not (isinstance(statement, ast.If) and all(isinstance(part, ast.Raise) for part in statement.body)):
            yield _Slot(body, index, owner)
            yield from _slots_inside(statement)
        for part in inner:
            yield from _slots_of_body(statement, part)


def _slots_inside(node: ast.AST, around: tuple[ast.expr, ...] = ()) -> Iterator[_Slot]:
    """Yield the expressions below a node, without statements, annotations and formatted texts."""
    if isinstance(node, ast.expr) and not (isinstance(node, ast.Slice | ast.Attribute) or _has_slices(node)):
        around = (*around, node)
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "args") and isinstance(node, ast.AnnAssign | ast.Lambda):
            continue
        container: Any = value if isinstance(value, list) else vars(node)
        for key in range(len(value)) if isinstance(value, list) else [field]:
            child = container[key]
            if isinstance(child, ast.expr | ast.keyword | ast.comprehension | ast.withitem):
                slot = _Slot(container, key, node, around)
                if isinstance(child, ast.expr) and not isinstance(getattr(child, "ctx", None), ast.Store):
                    yield slot
                if not isinstance(child, ast.JoinedStr) and getattr(child, "arg", None) != "strict":
                    yield from _slots_inside(child, around)


def _has_slices(node: ast.expr) -> bool:
    """Return True for the index of a tensor with ranges, which cannot be displayed alone."""
    return isinstance(node, ast.Tuple) and any(isinstance(entry, ast.Slice) for entry in node.elts)


# ---- the bugs of each place ----


@singledispatch
def edits(node: ast.AST, parent: ast.AST, names: Names) -> Iterator[Edit]:
    """Yield the bugs of a node: nodes that replace it."""
    yield from ()


@edits.register
def _(node: ast.BinOp, parent: ast.AST, names: Names) -> Iterator[Edit]:
    kind, operator = OPERATORS.get(type(node.op), ("", None))
    if any(_is_collection(side) for side in (node.left, node.right)):
        return
    if isinstance(node.op, ast.Add | ast.Sub | ast.Mod):
        yield "term", node.left
    if isinstance(node.op, ast.Mult):
        yield "scale", node.right if isinstance(node.left, ast.Constant) else node.left
    elif operator is not None:
        yield kind, ast.BinOp(node.left, operator(), node.right)
    if isinstance(node.op, ast.FloorDiv):
        yield "edge", ast.BinOp(node, ast.Add(), ast.Constant(1))
    if isinstance(node.op, ast.MatMult):
        yield "order", ast.BinOp(node.right, ast.MatMult(), node.left)


def _is_collection(node: ast.expr) -> bool:
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, ast.Tuple | ast.List | ast.Dict | ast.JoinedStr)


@edits.register
def _(node: ast.AugAssign, parent: ast.AST, names: Names) -> Iterator[Edit]:
    kind, operator = OPERATORS.get(type(node.op), ("", None))
    if operator is not None:
        yield kind, ast.AugAssign(node.target, operator(), node.value)


@edits.register
def _(node: ast.UnaryOp, parent: ast.AST, names: Names) -> Iterator[Edit]:
    number = node.operand.value if isinstance(node.operand, ast.Constant) else None
    if type(number) is int and isinstance(node.op, ast.USub):
        yield from _changed_integer(-number, parent)
    elif isinstance(node.op, ast.USub):
        yield "sign", node.operand
    else:
        yield "condition", node.operand


@edits.register
def _(node: ast.Compare, parent: ast.AST, names: Names) -> Iterator[Edit]:
    for index, operator in enumerate(node.ops):
        if type(operator) in OPERATORS:
            kind, replaced = OPERATORS[type(operator)]
            yield (
                kind,
                ast.Compare(node.left, [*node.ops[:index], replaced(), *node.ops[index + 1 :]], node.comparators),
            )


@edits.register
def _(node: ast.BoolOp, parent: ast.AST, names: Names) -> Iterator[Edit]:
    kind, replaced = OPERATORS[type(node.op)]
    yield kind, ast.BoolOp(replaced(), node.values)


@edits.register
def _(node: ast.IfExp, parent: ast.AST, names: Names) -> Iterator[Edit]:
    if _is_flag(node.test):
        yield "condition", ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)


@edits.register
def _(node: ast.If, parent: ast.AST, names: Names) -> Iterator[Edit]:
    if _is_flag(node.test):
        yield "condition", ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)


def _is_flag(test: ast.expr) -> bool:
    """Return True for a condition with no smaller bug in it. Without its condition, a test of None fails at once."""
    return isinstance(test, ast.Name | ast.Attribute | ast.Call)


@edits.register
def _(node: ast.Slice, parent: ast.AST, names: Names) -> Iterator[Edit]:
    for field, operator in (("lower", ast.Add()), ("upper", ast.Sub())):
        bound = getattr(node, field)
        if bound is not None and not _is_number(bound):
            bounds = {"lower": node.lower, "upper": node.upper, field: ast.BinOp(bound, operator, ast.Constant(1))}
            yield "edge", ast.Slice(bounds["lower"], bounds["upper"], node.step)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)


@edits.register
def _(node: ast.Constant, parent: ast.AST, names: Names) -> Iterator[Edit]:
    value = node.value
    if isinstance(value, bool):
        yield "flag", ast.Constant(not value)
    elif isinstance(value, int) and not isinstance(parent, ast.UnaryOp):
        yield from _changed_integer(value, parent)
    elif isinstance(value, float):
        yield "scale", ast.Constant(2 * value or 1.0)
    elif isinstance(value, str) and "->" in value:
        yield from _changed_pattern(value)


def _changed_integer(value: int, parent: ast.AST) -> Iterator[Edit]:
    """Yield an axis next to an axis, the last entry for the first and vice versa, or a number that is off by one."""
    if _is_axis(parent):
        yield "axis", _integer({0: 1, -1: -2}.get(value, value - 1 if value > 0 else value + 1))
    elif isinstance(parent, ast.Subscript) and value in (0, -1):
        yield "first for last" if value else "last for first", _integer(-1 - value)
    else:
        yield "off by one", _integer(value + 1 if value >= 0 else value - 1)


def _is_axis(parent: ast.AST) -> bool:
    """Return True if an integer with this parent is an axis."""
    if isinstance(parent, ast.keyword):
        return parent.arg in AXES
    return isinstance(parent, ast.Call) and AXIS_FIRST.fullmatch(getattr(parent.func, "attr", "")) is not None


def _integer(value: int) -> ast.expr:
    return ast.Constant(value) if value >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-value))


def _changed_pattern(text: str) -> Iterator[Edit]:
    """Yield the pattern of an einsum or of axes with two axes exchanged."""
    left, _, right = text.partition("->")
    if GROUP.search(right):
        yield "axis", ast.Constant("->".join((left, GROUP.sub(r"(\2 \1)", right, count=1))))
    elif GROUP.search(left):
        yield "axis", ast.Constant("->".join((GROUP.sub(r"(\2 \1)", left, count=1), right)))
    elif OUTPUT.search(text):
        yield "axis", ast.Constant(OUTPUT.sub(r"\1\3\2", text))


@edits.register
def _(node: ast.Expr, parent: ast.AST, names: Names) -> Iterator[Edit]:
    if isinstance(node.value, ast.Call) and "super" not in ast.unparse(node):
        yield "step", ast.Pass()


@edits.register
def _(node: ast.Call, parent: ast.AST, names: Names) -> Iterator[Edit]:
    name, arguments = _called_name(node.func), node.args
    if any(isinstance(argument, ast.Starred) for argument in arguments):
        return
    if name in FUNCTIONS:
        yield "function", ast.Call(_renamed(node.func, FUNCTIONS[name]), arguments, node.keywords)
    exchanged = [*arguments[1::-1], *arguments[2:]]
    constants = [argument for argument in arguments[:2] if isinstance(argument, ast.Constant)]
    ordered = len(constants) < 2 and not any(isinstance(constant.value, str) for constant in constants)
    if len(arguments) > 1 and ordered and name not in UNORDERED:
        yield "order", ast.Call(node.func, exchanged, node.keywords)
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None and "super(" not in ast.unparse(node.func):
            yield "argument", ast.Call(node.func, arguments, [*node.keywords[:index], *node.keywords[index + 1 :]])
    result = _result_without(node, name, names)
    if result is not None and not isinstance(parent, ast.Expr):
        yield "step", result


def _called_name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _renamed(function: ast.expr, name: str) -> ast.expr:
    return (
        ast.Attribute(function.value, name, ast.Load())
        if isinstance(function, ast.Attribute)
        else ast.Name(name, ast.Load())
    )


def _result_without(node: ast.Call, name: str, names: Names) -> ast.expr | None:
    """Return the value that a call changes, so that the step can be left out; None if the call creates a value."""
    first = node.args[0] if node.args and not isinstance(node.args[0], ast.Constant) else None
    if isinstance(node.func, ast.Name):
        function = names.get(name, getattr(builtins, name, None))
        omitted = name in OMITTED or (function is not None and not hasattr(builtins, name))
        return first if omitted and not isinstance(function, type) else None
    if not isinstance(node.func, ast.Attribute) or name in SIZES:
        return None
    receiver = node.func.value
    root = receiver
    while isinstance(root, ast.Attribute):
        root = root.value
    function = isinstance(root, ast.Name) and (root.id == "self" or isinstance(names.get(root.id), ModuleType))
    if function and (first is not None or receiver is root):  # not a method of a tensor
        return None if isinstance(first, ast.Name) and first.id == "make" else first
    return None if "super(" in ast.unparse(receiver) else receiver

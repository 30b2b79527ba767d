"""Rules of masks: chunks, blocks, and conditions that a spec spells out.

Chunks: https://ai.meta.com/blog/llama-4-multimodal-intelligence. Blocks: https://arxiv.org/abs/2503.09573.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tfkit.component import Dim, Make, MaskConfig, MaskRuleConfig
from tfkit.errors import Invalid, quoted
from tfkit.nn import Program, Value, settings


class ChunkConfig(MaskRuleConfig):
    """Each query attends to the keys of its chunk: positions n * size to (n + 1) * size - 1."""

    kind: Literal["chunk"] = "chunk"
    size: Dim
    """Number of positions of a chunk."""

    @property
    def reach(self) -> int | None:
        return self.size

    def check_mask(self, mask: MaskConfig) -> None:
        _check_extent(self, "left", mask.left)
        if not mask.causal:
            _check_extent(self, "right", mask.right)

    def build(self, make: Make) -> nn.Module:
        return Chunk(self.size)


class Chunk(nn.Module):
    """Positions of queries and of keys -> True in the same chunk."""

    extra_repr = settings

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries // self.size == keys // self.size


class BlocksConfig(MaskRuleConfig):
    """Each query attends to the keys of its block, also later keys, and of all blocks before it."""

    kind: Literal["blocks"] = "blocks"
    size: Dim
    """Number of positions of a block."""

    def check_mask(self, mask: MaskConfig) -> None:
        if mask.causal:
            message = "`blocks` has no effect with `right: 0`: it hides no earlier key"
            raise Invalid("rule", message, help="leave out `right`")
        _check_extent(self, "right", mask.right)

    def build(self, make: Make) -> nn.Module:
        return Blocks(self.size)


def _check_extent(rule: ChunkConfig | BlocksConfig, side: str, extent: int | None) -> None:
    """Raise `Invalid` for an extent that hides no key of a chunk or block."""
    if extent is not None and extent >= rule.size - 1:
        message = (
            f"`{side}` has no effect: `{rule.kind}` hides all keys on this side that are more than {rule.size - 1} "
            f"positions away; got {extent}"
        )
        raise Invalid(side, message, help=f"leave out `{side}`")


class Blocks(Chunk):
    """Positions of queries and of keys -> True in the same block and in all blocks before it."""

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        return keys // self.size <= queries // self.size


class ExpressionConfig(MaskRuleConfig):
    """A query at position q attends to a key at position k if a condition holds: `(q - k) % 2 == 0 or k < 4`."""

    kind: Literal["expression"] = "expression"
    where: str
    """Comparisons of q, k, integers and arithmetic with + - * // %, joined by and, or, not and parentheses."""

    def check(self) -> None:
        """Raise `Invalid` unless `where` is a condition on q and k."""
        super().check()
        self._written()

    def build(self, make: Make) -> nn.Module:
        program, fits = self._written()
        return program.build(fits, "Expression")

    def _written(self) -> tuple[Program, Value]:
        program, column = Program(), 0
        try:
            with warnings.catch_warnings(action="ignore"):  # of `4or 2`, which is an error below
                tree = ast.parse(self.where[:MAX_LENGTH], mode="eval").body
            if len(self.where) <= MAX_LENGTH:
                return program, _condition(tree, program, {name: program.input(name) for name in ("q", "k")})
        except SyntaxError as error:
            column = error.offset or len(self.where)
        except (ValueError, MemoryError, RecursionError) as error:
            if isinstance(error, Invalid):
                raise
        position = f", with an error in column {column}" if column else ""
        message = (
            f"a condition must be an expression of at most {MAX_LENGTH} characters; got {quoted(self.where)}{position}"
        )
        raise Invalid("where", message, help=GRAMMAR)


MAX_LENGTH = 200
GRAMMAR = "write a condition such as `(q - k) % 2 == 0 or k < 4`, with q, k, integers, + - * // % and comparisons"
OPERATIONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.And: operator.and_, ast.Or: operator.or_,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def _condition(node: ast.expr, program: Program, positions: Mapping[str, Value]) -> Value:
    """Write a condition into a program. The grammar is closed: no other names, no calls, no code."""
    if isinstance(node, ast.BoolOp):
        parts = [_condition(part, program, positions) for part in node.values]
        return reduce(partial(program.apply, "fits", OPERATIONS[type(node.op)]), parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return program.apply("fits", torch.logical_not, _condition(node.operand, program, positions))
    if not isinstance(node, ast.Compare) or len(node.ops) > 1 or type(node.ops[0]) not in OPERATIONS:
        raise _invalid(node, "a condition must compare two numbers")
    numbers = [_number(part, program, positions) for part in (node.left, *node.comparators)]
    if not any(isinstance(number, Value) for number in numbers):
        raise _invalid(node, "a comparison must contain q or k")
    return program.apply("fits", OPERATIONS[type(node.ops[0])], *numbers)


def _number(node: ast.expr, program: Program, positions: Mapping[str, Value]) -> Value | int:
    """Write a number into a program; return the value of an integer."""
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 2**31:
        return node.value
    if isinstance(node, ast.Name) and node.id in positions:
        return positions[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = ast.copy_location(ast.BinOp(ast.Constant(0), ast.Sub(), node.operand), node)
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATIONS:
        raise _invalid(node, "a number must be q, k, an integer below 2^31, or arithmetic with + - * // %")
    left, right = (_number(part, program, positions) for part in (node.left, node.right))
    if isinstance(node.op, ast.FloorDiv | ast.Mod) and (isinstance(right, Value) or right < 1):
        raise _invalid(node.right, "a divisor must be a positive integer")
    if isinstance(left, Value) or isinstance(right, Value):
        return program.apply("n", OPERATIONS[type(node.op)], left, right)
    return int(OPERATIONS[type(node.op)](left, right))


def _invalid(node: ast.expr, message: str) -> Invalid:
    return Invalid("where", f"{message}; got {quoted(ast.unparse(node))} in column {node.col_offset + 1}", help=GRAMMAR)

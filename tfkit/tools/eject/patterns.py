"""Patterns of einops as operations of torch, in the way of `tfkit.nn.Rearrange`, with the patterns as comments.

Ejected files have no class for a rearrangement that a module calls by its name: the operations replace the call.
"""

from __future__ import annotations

import ast
import math
import re
import string
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from einops import EinopsError
from einops.layers import torch as layers
from torch import Tensor, nn

from tfkit.nn import Rearrange
from tfkit.nn.rearrange import operations, written
from tfkit.tools.eject.cleanup import Replaced, copied_tree, returned_expression
from tfkit.tools.eject.config import text_of
from tfkit.tools.eject.source import ejection_error

_COMMENT = "_comment"


class EinMix(layers.EinMix):
    """An einsum of the input and a weight, plus a bias."""

    def _create_parameters(self, weight_shape: Any, weight_bound: Any, bias_shape: Any, bias_bound: Any) -> None:
        super()._create_parameters(weight_shape, weight_bound, bias_shape, bias_bound)
        self.weight_bound, self.bias_bound = weight_bound, bias_bound

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -self.weight_bound, self.weight_bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -self.bias_bound, self.bias_bound)


def pack(tensors: list[Tensor], before: int, after: int) -> tuple[Tensor, list[torch.Size]]:
    """Flatten the axes between the first and the last axes of each tensor, and concatenate the tensors there."""
    shapes = [tensor.shape[before : tensor.dim() - after] for tensor in tensors]
    flat = [tensor.reshape(*tensor.shape[:before], -1, *tensor.shape[tensor.dim() - after :]) for tensor in tensors]
    return torch.cat(flat, dim=before), shapes


def unpack(tensor: Tensor, shapes: list[torch.Size], before: int) -> list[Tensor]:
    """Split the axis after the first axes of a tensor, and give each part its shape."""
    sizes = [-1 if -1 in shape else math.prod(shape) for shape in shapes]
    free = tensor.size(before) - sum([size for size in sizes if size >= 0])
    sizes = [size if size >= 0 else free for size in sizes]
    parts = zip(accumulate(sizes), sizes, shapes, strict=True)
    return [
        tensor.narrow(before, end - size, size).reshape(*tensor.shape[:before], *shape, *tensor.shape[before + 1 :])
        for end, size, shape in parts
    ]


def prepare_patterns(model: nn.Module) -> None:
    """Replace the layers of einops, and copy the sizes of rearrangements to the modules that contain them."""
    replaced: dict[nn.Module, nn.Module] = {}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = layer = replaced.setdefault(child, _of_torch(child))
                for axis in layer.known if isinstance(layer, Rearrange) else ():
                    setattr(module, _axis_attribute(module, name, layer, axis), getattr(layer, axis))


def _of_torch(module: Any) -> nn.Module:
    """Return a module that computes the same as a layer of einops; any other module unchanged."""
    if type(module) is layers.EinMix:
        with torch.device("meta"):
            bounds = EinMix(module.pattern, module.weight_shape, module.bias_shape, **module.axes_lengths)
        module.weight_bound, module.bias_bound = bounds.weight_bound, bounds.bias_bound
        module.__class__ = EinMix
    if type(module) not in (layers.Rearrange, layers.Reduce):
        return module
    sizes, operation = module.axes_lengths, str(getattr(module, "reduction", "rearrange"))
    try:
        layer = written(module.pattern, tuple(sizes), (), operation)
    except EinopsError as cause:
        raise ejection_error(module, str(cause)) from cause
    result = layer.__new__(layer)
    nn.Module.__init__(result)
    vars(result).update(sizes, pattern=module.pattern, sizes=sizes, known=tuple(sizes))
    return result


def _axis_attribute(module: nn.Module, name: str, child: nn.Module, axis: str) -> str:
    """Return the letter of the axis as name of the attribute, unless the module uses that name otherwise."""
    value = getattr(child, axis)
    current = getattr(module, axis, value)
    same = isinstance(current, int | list) and text_of(current) == text_of(value)
    return axis if same else f"{name}_{axis}"


def with_patterns(tree: ast.FunctionDef, module: nn.Module) -> ast.FunctionDef:
    """Replace the calls of rearrangements in a method by their operations."""
    if not isinstance(module, EinMix) and not any(isinstance(child, Rearrange) for child in module.children()):
        return tree
    tree = copied_tree(tree)
    if isinstance(module, EinMix):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.einsum":
                node.args[0] = ast.Constant(module.einsum_pattern)
                set_pattern(node, f"{module.pattern}, weight {module.weight_shape}")
    return _DrawnIn(module, tree.args.args[0].arg).visit(tree)


def set_pattern(node: ast.expr, pattern: str) -> ast.expr:
    """Set the pattern of an expression."""
    node.pattern = " ".join(pattern.split())  # type: ignore[attr-defined]
    return node


def pattern_comments(step: ast.stmt) -> list[ast.stmt]:
    """Return the patterns in a statement, inner expressions first, as statements that `as_comments` replaces."""
    nodes = [] if hasattr(step, "body") else [*ast.walk(step)]
    texts = dict.fromkeys(node.pattern for node in reversed(nodes) if hasattr(node, "pattern"))
    return [ast.Expr(ast.Subscript(ast.Name(_COMMENT), ast.Constant(text))) for text in texts]


def as_comments(text: str) -> str:
    """Replace the statements of `comments` by comments, which a syntax tree cannot contain."""
    return re.sub(rf"^( *){_COMMENT}\['(.*)'\]$", r"\1# \2", text, flags=re.MULTILINE)


def equation_of(pattern: str) -> str:
    """Return the equation of `torch.einsum` for a pattern that einops has accepted: a letter for each name."""
    words = re.findall(r"\w+|\.\.\.|,|->", pattern)
    letters = dict(zip(dict.fromkeys(filter(str.isidentifier, words)), string.ascii_letters, strict=False))
    return "".join(letters.get(word, word) for word in words)


def call_of(operation: str, tensor: ast.expr, pattern: str, sizes: Mapping[str, ast.expr]) -> ast.expr:
    """Return the operations that a call of `rearrange`, `repeat` or `reduce` stands for."""
    text = "".join(operations(pattern, {axis: f"size_{axis}" for axis in sizes}, operation))
    call = ast.parse(f"x{text}", mode="eval").body
    if text:
        set_pattern(call, pattern if operation in ("rearrange", "repeat") else f"{operation}: {pattern}")
    names = {"x": tensor, **{f"size_{axis}": size for axis, size in sizes.items()}}
    return Replaced(names).visit(call)


class _DrawnIn(ast.NodeTransformer):
    def __init__(self, module: nn.Module, self_name: str) -> None:
        self.module = module
        self.self_name = self_name

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        steps = self._steps(node)
        return node if steps is None or len(steps) > 1 else returned_expression(steps[-1])

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        return self._statements(node)

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        return self._statements(node)

    def _statements(self, node: ast.Assign | ast.Return) -> list[ast.stmt]:
        self.generic_visit(node)
        steps = node.value and self._steps(node.value)
        if not steps:
            return [node]
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Tuple):
            steps = _with_target_names(steps, target.elts)
        *before, last = steps
        node.value = returned_expression(last)
        return [*before, node]

    def _steps(self, node: ast.expr) -> list[ast.stmt] | None:
        """Return the operations of a rearrangement for a call; None for any other expression."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return None
        owner, name = node.func.value, node.func.attr
        child = self.module._modules.get(name)
        if not (isinstance(owner, ast.Name) and owner.id == self.self_name and isinstance(child, Rearrange)):
            return None
        (forward,) = ast.parse(child.code).body
        assert isinstance(forward, ast.FunctionDef)
        first = forward.body[0].value  # type: ignore[attr-defined]
        if isinstance(first, ast.Call):
            set_pattern(first, str(type(child).__doc__))
        for part in ast.walk(forward):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                part.value.id, part.attr = self.self_name, _axis_attribute(self.module, name, child, part.attr)
        x = node.args[0] if node.args else node.keywords[0].value
        return [Replaced({"x": x}).visit(step) for step in forward.body]


def _with_target_names(steps: list[ast.stmt], targets: Sequence[ast.expr]) -> list[ast.stmt]:
    """Replace the names of the parts in statements by the names of the targets."""
    first = steps[0]
    if not (isinstance(first, ast.Assign) and isinstance(parts := first.targets[0], ast.Tuple)):
        return steps
    names = {part.id: target for part, target in zip(parts.elts, targets, strict=True) if isinstance(part, ast.Name)}
    return [Replaced(names).visit(step) for step in steps]

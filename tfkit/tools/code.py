"""The forward of a built model as a person would write it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from torch import fx

WIDTH = 80


def forward_code(model: fx.GraphModule, width: int = WIDTH) -> str:
    """`model.code` without the lines that free memory, weights named where they are used, wrapped to `width`."""
    (function,) = ast.parse(model.code.strip()).body
    assert isinstance(function, ast.FunctionDef)
    inlined = _Inlined(_functions(model))
    body = [inlined.visit(step) for step in function.body if not _frees(step)]
    lines = [line for step in body if step is not None for line in _wrapped(ast.unparse(step), width - 4)]
    return "\n".join([*_signature(function, width), *(f"    {line}" for line in lines)])


def _functions(model: fx.GraphModule) -> dict[str, str]:
    """The functions that the forward calls, `package_module_name` as fx writes it, and their own names."""
    called = [node.target for node in model.graph.nodes if node.op == "call_function"]
    return {f"{one.__module__}.{one.__name__}".replace(".", "_"): one.__name__ for one in called if callable(one)}


def _frees(step: ast.stmt) -> bool:
    """True for the step `x = None`, which fx writes after the last use of `x`."""
    return isinstance(step, ast.Assign) and isinstance(step.value, ast.Constant) and step.value.value is None


class _Inlined(ast.NodeTransformer):
    """Replaces the names of weights (`w = self.embedding.tokens.weight`) by the weights themselves."""

    def __init__(self, functions: Mapping[str, str]) -> None:
        self.functions = functions
        self.weights: dict[str, ast.expr] = {}

    def visit_Assign(self, step: ast.Assign) -> ast.AST | None:
        target = step.targets[0]
        if isinstance(target, ast.Name) and isinstance(step.value, ast.Attribute):
            self.weights[target.id] = step.value
            return None
        return self.generic_visit(step)

    def visit_Name(self, name: ast.Name) -> ast.AST:
        if name.id in self.functions:
            return ast.Name(self.functions[name.id])
        return self.weights.get(name.id, name)


def _signature(function: ast.FunctionDef, width: int) -> list[str]:
    arguments = function.args
    required = len(arguments.args) - len(arguments.defaults)
    shown = []
    for index, argument in enumerate(arguments.args):
        text = argument.arg if argument.annotation is None else f"{argument.arg}: {_type(argument.annotation)}"
        default = arguments.defaults[index - required] if index >= required else None
        shown.append(text if default is None else f"{text} = {ast.unparse(default)}")
    return _broken("def forward(", shown, "):", width)


def _type(annotation: ast.expr) -> str:
    """`torch.Tensor|NoneType`, or an older torch's `typing_Union[torch.Tensor, NoneType]`, as `Tensor | None`."""
    text = re.sub(r"\bNoneType\b", "None", re.sub(r"\btorch\.Tensor\b", "Tensor", ast.unparse(annotation)))
    if match := re.fullmatch(r"typing_(?:Union|Optional)\[(.*)\]", text):
        members = match[1].removesuffix(", None")
        return f"{members.replace(', ', ' | ')} | None"
    return text


def _wrapped(line: str, width: int) -> list[str]:
    """A step on one line; a call that is too long with each argument on its own."""
    step = ast.parse(line).body[0]
    if len(line) <= width or not isinstance(step, ast.Assign) or not isinstance(step.value, ast.Call):
        return [line]
    call = step.value
    arguments = [ast.unparse(one) for one in [*call.args, *call.keywords]]
    return _broken(f"{ast.unparse(step.targets[0])} = {ast.unparse(call.func)}(", arguments, ")", width)


def _broken(start: str, parts: Sequence[str], end: str, width: int) -> list[str]:
    line = f"{start}{', '.join(parts)}{end}"
    return [line] if len(line) <= width else [start, *(f"    {part}," for part in parts), end]

"""Renaming the modules of a decoder: projections apart, and the names of Llama.

The functions of the model are already specialised. Three changes lead from the modules of tfkit to the names:

- A fused projection is divided: `q, k, v = self.qkv(x).split(...)` becomes `q = self.q_proj(x)` and so on.
- A module whose path is the path of the module around it is dissolved: its forward is inlined.
- Any other module is renamed where it is called.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from tfkit.building.initialize import RESETS
from tfkit.checkpoint.llama_names import LlamaNames
from tfkit.nn import Linear
from tfkit.tools.eject.cleanup import (
    Replaced,
    assigned_names,
    copied_tree,
    is_path,
    returned_expression,
    statement_blocks,
    variable_names,
)
from tfkit.tools.eject.source import ejection_error
from tfkit.tools.eject.specialise import Function, Specialiser
from tfkit.tools.eject.torch_modules import MOVED, arguments_of, plain_attributes, record_arguments

SPLITS = frozenset({"chunk", "split", "split_with_sizes", "tensor_split"})
"""Methods that return the parts of a tensor."""
PER_ELEMENT = frozenset({"clamp", "unflatten", "float", "to"})
"""Methods that may be called on each part instead: they change single values, or divide the last axis."""


def rename_modules(specialiser: Specialiser, body: nn.Module, names: LlamaNames) -> None:
    """Rename the modules of a body, in the modules and in the functions that call them."""
    renaming = _Renaming(specialiser, names)
    renaming.run(body, "", set())
    for key in [key for key in specialiser.functions if key[0] in renaming.dissolved]:
        del specialiser.functions[key]


class _Renaming:
    def __init__(self, specialiser: Specialiser, names: LlamaNames) -> None:
        self.specialiser = specialiser
        self.names = names
        self.dissolved = set[nn.Module]()

    def run(self, module: nn.Module, path: str, done: set[nn.Module]) -> None:
        """Rename the modules in a module, innermost first. `done` holds the modules that are complete."""
        children = {name: child for name, child in module._modules.items() if child is not None}
        paths = {name: f"{path}.{name}" if path else name for name in children}
        for name, child in children.items():
            self.run(child, paths[name], done)
        if module in done:  # equal layers are one module
            return
        done.add(module)
        renamed: dict[str, nn.Module] = {}
        for name, child in children.items():
            parts = self.names.parts_of(paths[name], child)
            new = self.names(paths[name])
            if parts:
                assert isinstance(child, Linear)
                renamed |= self._divide(module, name, child, [self._leaf(part) for part in parts])
            elif new == (self.names(path) if path else ""):
                renamed |= self._dissolve(module, name, child)
            else:
                renamed[self._leaf(paths[name])] = child
                self._rename(module, name, self._leaf(paths[name]))
        module._modules.clear()
        module._modules.update(renamed)

    def _leaf(self, path: str) -> str:
        return self.names(path).rpartition(".")[2]

    def _functions(self, module: nn.Module) -> list[Function]:
        return [function for (owner, _), function in self.specialiser.functions.items() if owner is module]

    def _rename(self, module: nn.Module, name: str, new: str) -> None:
        if name == new:
            return
        for function in self.specialiser.functions.values():
            renamed = _WithModule(function, module, name, new)
            body = [renamed.visit(step) for step in function.body]
            if renamed.changed:
                function.set_body(body)

    def _divide(self, module: nn.Module, name: str, fused: Linear, names: Sequence[str]) -> dict[str, nn.Module]:
        """Return the layers for the parts of a fused projection, which its callers call instead."""
        assert fused.parts is not None
        width = arguments_of(fused)["in_features"]
        with torch.device("meta"), record_arguments():
            sizes = zip(names, fused.parts.values(), strict=True)
            layers = {
                new: Linear(width, size, bias=fused.bias is not None, residual=fused.residual) for new, size in sizes
            }
        for function in self._functions(module):
            if name in function.attributes:
                for block in statement_blocks(function.body):
                    block[:] = [part for step in block for part in _divided_calls(step, function, name, names)]
                function.uses["torch"] = torch  # `set_body` removes it if it has no use
                function.set_body(function.body)
        return dict(layers)

    def _dissolve(self, host: nn.Module, name: str, child: nn.Module) -> dict[str, nn.Module]:
        """Inline the forward of a child, and return the child's children."""
        guest = self.specialiser.functions.get((child, "forward"))
        methods = {function.name: function for function in self._functions(child) if function is not guest}
        taken = {name for name in methods if hasattr(host, name) or name in RESETS}
        if taken or self.specialiser.read.get(child, set()) - {*child._modules}:
            raise ejection_error(child, "its methods and attributes cannot move to the module around it")
        for method, function in methods.items():
            moved = copy.copy(function)
            moved.module = host
            self.specialiser.functions[host, method] = moved
        for function in self._functions(host):
            if name not in function.attributes:
                continue
            assert guest is not None
            used = set[str]().union(*(method.attributes for method in self._functions(child)))
            for attribute in used & plain_attributes(child).keys():
                self._move(host, name, child, attribute, guest)
            _inline(function, guest, name)
        for tensor, parameter in child._parameters.items():
            host.register_parameter(tensor, parameter)
        self.dissolved.add(child)
        return {new: part for new, part in child._modules.items() if part is not None}

    def _move(self, host: nn.Module, name: str, child: nn.Module, attribute: str, guest: Function) -> None:
        """Set an attribute of a dissolved child on its host, by a different name if the host has the name."""
        value, new = getattr(child, attribute), attribute
        if hasattr(host, attribute) and getattr(host, attribute) is not value:
            new = f"{name}_{attribute}"
            guest.set_body([_WithModule(guest, child, attribute, new).visit(step) for step in guest.body])
        host.__dict__[new] = value
        host.__dict__.setdefault(MOVED, {})[new] = value


class _WithModule(ast.NodeTransformer):
    """Renames an attribute of a module in a method: `self.name`, also as `self.inner.name`."""

    changed = False

    def __init__(self, function: Function, module: nn.Module, name: str, new: str) -> None:
        self.function = function
        self.module = module
        self.name = name
        self.new = new

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        is_ours = node.attr == self.name and self._module_of(node.value) is self.module
        self.changed |= is_ours
        self.generic_visit(node)
        return ast.Attribute(node.value, self.new) if is_ours else node

    def _module_of(self, node: ast.expr) -> nn.Module | None:
        """Return the module of an expression such as `self.inner`; None for any other expression."""
        if isinstance(node, ast.Name):
            return self.function.module if node.id == self.function.self_name else None
        if not isinstance(node, ast.Attribute):
            return None
        owner = self._module_of(node.value)
        return None if owner is None else owner._modules.get(node.attr)


def _is_call(node: ast.AST, function: Function, name: str) -> bool:
    """Return True for the call `self.name(...)`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner = node.func.value
    return node.func.attr == name and isinstance(owner, ast.Name) and owner.id == function.self_name


def _divided_calls(step: ast.stmt, function: Function, name: str, names: Sequence[str]) -> list[ast.stmt]:
    """Replace the calls of a fused projection in a statement by calls of its parts."""
    first: list[ast.stmt] = []

    def divided(call: ast.Call) -> ast.expr:
        (argument,) = call.args
        if not is_path(argument):
            first.append(ast.Assign([ast.Name(f"{name}_input")], argument, lineno=0))
            argument = ast.Name(f"{name}_input")
        owner = ast.Name(function.self_name or "")
        calls: list[ast.expr] = [ast.Call(ast.Attribute(owner, new), [copied_tree(argument)], []) for new in names]
        return ast.Call(
            ast.Attribute(ast.Name("torch"), "cat"), [ast.Tuple(calls)], [ast.keyword("dim", ast.Constant(-1))]
        )

    if hasattr(step, "body"):  # the calls are in the nested blocks
        return [step]
    replaced = _CallsReplaced(lambda node: _is_call(node, function, name), divided).visit(step)
    return [*first, *_separate_parts(replaced)]


class _CallsReplaced(ast.NodeTransformer):
    def __init__(self, is_ours: Callable[[ast.Call], bool], replace: Callable[[ast.Call], ast.expr]) -> None:
        self.is_ours = is_ours
        self.replace = replace

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return self.replace(node) if self.is_ours(node) else node


def _separate_parts(step: ast.stmt) -> list[ast.stmt]:
    """Write `a, b = torch.cat((first, second)).chunk(2)` as `a = first` and `b = second`.

    The sizes of the parts are not compared: the verification of the folder compares the results.
    """
    if not (isinstance(step, ast.Assign) and isinstance(target := step.targets[0], ast.Tuple)):
        return [step]
    methods: list[ast.Call] = []
    value = step.value
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not _is_cat(value):
        methods.append(value)
        value = value.func.value
    names = [call.func.attr for call in methods if isinstance(call.func, ast.Attribute)]
    if not (_is_cat(value) and names and names[0] in SPLITS and {*names[1:]} <= PER_ELEMENT):
        return [step]
    assert isinstance(value, ast.Call)
    parts = value.args[0].elts  # type: ignore[attr-defined]
    if len(parts) != len(target.elts):
        return [step]
    pattern = next((call.pattern for call in methods if hasattr(call, "pattern")), None)
    values: list[ast.expr] = []
    for part in parts:
        separate = part
        for call, method in reversed(list(zip(methods[1:], names[1:], strict=True))):
            separate = ast.Call(ast.Attribute(separate, method), copied_tree(call.args), copied_tree(call.keywords))
        values.append(separate)
    if pattern is not None:
        values[0].pattern = pattern  # type: ignore[attr-defined]
    read = set[str]().union(*map(variable_names, values))
    if read & variable_names(target):
        return [ast.Assign([target], ast.Tuple(values), lineno=0)]
    return [ast.Assign([name], value, lineno=0) for name, value in zip(target.elts, values, strict=True)]


def _is_cat(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.cat" and isinstance(node.args[0], ast.Tuple)


def _inline(host: Function, guest: Function, name: str) -> None:
    """Inline the calls `self.name(...)` in a method."""
    for block in statement_blocks(host.body):
        steps: list[ast.stmt] = []
        for index, step in enumerate(block):
            later = block[index + 1 :] if block is host.body else host.body
            steps += _inlined_calls(step, host, guest, name, {n for other in later for n in variable_names(other)})
        block[:] = steps
    host.uses |= guest.uses
    host.set_body(host.body)


def _inlined_calls(step: ast.stmt, host: Function, guest: Function, name: str, later: set[str]) -> list[ast.stmt]:
    """Return a statement with the statements of a method in place of its call. Later statements read `later`."""
    calls = [node for node in ast.walk(step) if isinstance(node, ast.Call) and _is_call(node, host, name)]
    if not calls or hasattr(step, "body"):  # the calls are in the nested blocks
        return [step]
    (call,) = calls
    rest: list[ast.stmt] = []
    if not isinstance(step, ast.Assign | ast.Return) or step.value is not call:
        output = ast.Name(f"{name}_output")
        rest = [_CallsReplaced(lambda node: node is call, lambda _: output).visit(step)]
        later = later | variable_names(rest[0])
        step = ast.Assign([output], call, lineno=0)
    later -= variable_names(step.targets[0]) if isinstance(step, ast.Assign) else set()
    arguments = dict(zip(guest.parameters, call.args, strict=False))
    arguments |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    local = {*guest.parameters, *(assigned for statement in guest.body for assigned in assigned_names(statement))}
    constant = {n for n, value in arguments.items() if isinstance(value, ast.Name) and value.id == n}
    constant -= {assigned for statement in guest.body for assigned in assigned_names(statement)}
    new = Replaced({n: ast.Name(f"{name}_{n}") for n in (local - constant) & later})
    *before, last = [new.visit(copied_tree(statement)) for statement in guest.body]
    pairs = [(new.visit(ast.Name(n)), value) for n, value in arguments.items()]
    pairs = [(target, value) for target, value in pairs if ast.unparse(target) != ast.unparse(value)]
    first: list[ast.stmt] = []
    if pairs:  # assigned together, because a value may read the name of an earlier argument
        targets, values = zip(*pairs, strict=True)
        single = len(pairs) == 1
        first = [
            ast.Assign(
                [targets[0] if single else ast.Tuple([*targets])],
                values[0] if single else ast.Tuple([*values]),
                lineno=0,
            )
        ]
    step.value = returned_expression(last)
    return [*first, *before, step, *rest]

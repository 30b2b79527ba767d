"""Inlines functions and methods that are short and called only once."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping

from torch import nn

from tfkit.tools.eject.cleanup import (
    Replaced,
    assigned_names,
    copied_tree,
    is_path,
    returned_expression,
    statement_blocks,
    variable_names,
)
from tfkit.tools.eject.source import Key
from tfkit.tools.eject.specialise import Function

MAX_STATEMENTS = 4
"""Maximum number of statements of an inlined method."""
LENGTH = 40
"""Maximum length of an expression that is inlined in several places, in characters."""


def draw_in(functions: dict[Key, Function], read: Mapping[nn.Module, set[str]]) -> None:
    """Inline the functions of a model that are short and called only once.

    `read` holds the attributes of modules that other modules use; these stay.
    """
    for key, guest in list(functions.items()):
        used = guest.module is not None and guest.name in read.get(guest.module, ())
        if guest.name == "forward" or used or not _has_single_return(guest.body) or len(guest.body) > MAX_STATEMENTS:
            continue
        near = [function for function in functions.values() if guest.module in (None, function.module)]
        hosts = [
            function
            for function in near
            for step in function.body
            for node in ast.walk(step)
            if _is_reference(node, guest)
        ]
        if len(hosts) == 1 and _drawn_into(hosts[0], guest):
            del functions[key]


def draw_in_expressions(functions: dict[Key, Function], read: Mapping[nn.Module, set[str]]) -> None:
    """Inline functions and methods that only return an expression.

    A long expression is inlined only if there is a single call. `read` holds the attributes of modules that other
    modules use; these stay.
    """
    for key, guest in list(functions.items()):
        value = guest.expression
        used = guest.module is not None and guest.name in read.get(guest.module, ())
        if value is None or guest.name == "forward" or used:
            continue
        inside = [function for function in functions.values() if guest.module in (None, function.module)]
        nodes = [node for function in inside for step in function.body for node in ast.walk(step)]
        calls = [node for node in nodes if isinstance(node, ast.Call) and _is_reference(node.func, guest)]
        text = ast.unparse(value)
        if len(calls) != sum(_is_reference(node, guest) for node in nodes) or (len(calls) > 1 and len(text) > LENGTH):
            continue
        if not all(_may_inline_call(guest, call) for call in calls):
            continue
        for function in inside:
            if any(_is_reference(node, guest) for step in function.body for node in ast.walk(step)):
                function.uses |= guest.uses
                function.set_body([_Inlined(guest).visit(step) for step in function.body])
        del functions[key]


def _may_inline_call(guest: Function, call: ast.Call) -> bool:
    """Return True if every parameter gets a value that is read only once or is a name."""
    arguments = _call_arguments(guest, call)
    reads_of = [node.id for node in ast.walk(guest.expression or call) if isinstance(node, ast.Name)]
    return set(arguments) == set(guest.parameters) and all(
        reads_of.count(name) <= 1 or is_path(value) for name, value in arguments.items()
    )


def _call_arguments(guest: Function, call: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of a call by parameter."""
    arguments = dict(zip(guest.parameters, call.args, strict=False))
    return arguments | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


class _Inlined(ast.NodeTransformer):
    """Replaces calls of a function by its expression."""

    def __init__(self, guest: Function) -> None:
        self.guest = guest

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not _is_reference(node.func, self.guest) or self.guest.expression is None:
            return node
        return Replaced(_call_arguments(self.guest, node)).visit(copied_tree(self.guest.expression))


def _has_single_return(steps: list[ast.stmt]) -> bool:
    """Return True if a body returns only at its end."""
    returns = [node for step in steps for node in ast.walk(step) if isinstance(node, ast.Return)]
    return len(returns) == 1 and returns[0] is steps[-1] and returns[0].value is not None


def _is_reference(node: ast.AST, function: Function) -> bool:
    """Return True for a reference to a function: its name, or `self.` and the name of a method."""
    if function.module is None:
        return isinstance(node, ast.Name) and node.id == function.name
    on_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return on_self and node.attr == function.name  # type: ignore[attr-defined]


def _drawn_into(host: Function, guest: Function) -> bool:
    """Inline a function into a statement that assigns or returns its result; return False if there is none."""
    for block in statement_blocks(host.body):
        for index, step in enumerate(block):
            if not isinstance(step, ast.Assign | ast.Return) or not isinstance(call := step.value, ast.Call):
                continue
            if _is_reference(call.func, guest):
                replaced = {*assigned_names(step)} - variable_names(call)  # the function may assign these names first
                outer = {name for statement in host.body for name in variable_names(statement)} - replaced
                later = {name for after in _statements_after(host.body, step) for name in variable_names(after)}
                steps = _inlined_statements(guest, call, outer, later - {*assigned_names(step)})
                if steps is None:
                    return False
                *before, last = steps
                step.value = returned_expression(last)
                block[index:index] = before
                host.uses |= guest.uses
                host.set_body(host.body)
                return True
    return False


def _statements_after(body: list[ast.stmt], step: ast.stmt) -> list[ast.stmt]:
    """Return the statements of a body that may run after a statement in it; of a loop around it, all statements."""
    index = next(index for index, outer in enumerate(body) if any(node is step for node in ast.walk(outer)))
    outer, rest = body[index], body[index + 1 :]
    if outer is step:
        return rest
    if isinstance(outer, ast.If):
        branch = outer.body if any(node is step for inner in outer.body for node in ast.walk(inner)) else outer.orelse
        return [*_statements_after(branch, step), *rest]
    return [outer, *rest]


def _inlined_statements(guest: Function, call: ast.Call, outer: set[str], later: set[str]) -> list[ast.stmt] | None:
    """Return the statements of a function for the arguments of a call; None if a name would have two meanings.

    `outer` are the other names of the calling function, and `later` those that it uses after the call.
    """
    arguments = _call_arguments(guest, call)
    renamed: dict[str, ast.expr] = {
        name: value for name, value in arguments.items() if isinstance(value, ast.Name) and value.id != name
    }
    local = {name for step in guest.body for name in variable_names(step)} - {*guest.uses, *vars(builtins), "self"}
    if any(name in outer and not _is_same_name(arguments.get(name), name) for name in local):
        return None
    assigned = {name for step in guest.body for name in assigned_names(step)}
    if set(arguments) != set(guest.parameters) or assigned & (renamed.keys() | (arguments.keys() & later)):
        return None
    first = [
        ast.Assign([ast.Name(name)], value, lineno=0)
        for name, value in arguments.items()
        if not _is_same_name(value, name) and name not in renamed
    ]
    return [*first, *(Replaced(renamed).visit(copied_tree(step)) for step in guest.body)]


def _is_same_name(value: ast.expr | None, name: str) -> bool:
    return isinstance(value, ast.Name) and value.id == name

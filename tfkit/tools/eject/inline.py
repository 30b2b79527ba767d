"""Inlines calls that a person would not make: of a stateless module of one expression, of a method called once."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping

from torch import nn

from tfkit.tools.eject.call_graph import Key, Specialised
from tfkit.tools.eject.cleanup import Replaced, reads, stored, tidied

SHORT = 4
"""Most statements that a method may have to be written where it is called."""


def expression(entries: list[Specialised], given: Mapping[str, ast.expr]) -> ast.expr | None:
    """The result of calls of modules as one expression of the arguments; None if it is more, or reads the modules."""
    first = entries[0]
    if any(one.attributes for one in entries):
        return None
    if any(list(map(ast.dump, one.body)) != list(map(ast.dump, first.body)) for one in entries):
        return None
    if len(first.body) != 1 or not isinstance(step := first.body[0], ast.Return) or step.value is None:
        return None
    names = [node.id for node in ast.walk(step.value) if isinstance(node, ast.Name)]
    for name in first.parameters:
        if name not in given or (names.count(name) > 1 and not is_path(given[name])):
            return None
    return Replaced(dict(given)).visit(copy.deepcopy(step.value))


def is_path(node: ast.expr) -> bool:
    """True for a name, or an attribute of one."""
    return all(isinstance(one, ast.Attribute | ast.Name | ast.Constant | ast.Load) for one in ast.walk(node))


def drawn_in(functions: dict[Key, Specialised], read: Mapping[nn.Module, set[str]]) -> dict[Key, Specialised]:
    """The functions of a model, with short ones that are called once written where they are called.

    `read` has the names in a module that other modules use: these stay.
    """
    functions = dict(functions)
    for key in list(functions):
        entry = functions[key]  # looked up again: a function may have been written into it by now
        name = key[-1] if len(key) == 2 else key[0].__name__
        used = len(key) == 2 and name in read.get(key[0], ())
        if name == "forward" or used or not _straight(entry.body) or len(entry.body) > SHORT:
            continue
        near = [other for other in functions if len(key) == 1 or other[0] is key[0]]
        calls = [(owner, step) for owner in near for step in _steps(functions[owner].body) if _calls(step, key)]
        named = sum(_named(step, key) for owner in near for step in functions[owner].body)
        if len(calls) == 1 and named == 1:
            owner, step = calls[0]
            body = _replaced(functions[owner].body, step, entry)
            if body is not None:
                functions[owner] = _hosting(functions[owner], body, entry, name)
                del functions[key]
    return functions


def _hosting(host: Specialised, body: list[ast.stmt], guest: Specialised, name: str) -> Specialised:
    host = copy.copy(host)
    host.body = tidied(body)
    host.uses = {used: value for used, value in host.uses.items() if used != name} | guest.uses
    host.attributes = (host.attributes | guest.attributes) - {name}
    return host


def _straight(steps: list[ast.stmt]) -> bool:
    """True if a body returns at its end and nowhere else."""
    returns = [node for step in steps for node in ast.walk(step) if isinstance(node, ast.Return)]
    return len(returns) == 1 and returns[0] is steps[-1] and returns[0].value is not None


def _steps(steps: list[ast.stmt]) -> list[ast.stmt]:
    inner = [one for step in steps for name in ("body", "orelse") for one in _steps(getattr(step, name, []))]
    return [*steps, *inner]


def _calls(step: ast.stmt, key: Key) -> bool:
    """True if a statement only assigns, or returns, the result of the function."""
    value = step.value if isinstance(step, ast.Assign | ast.Return) else None
    return isinstance(value, ast.Call) and _is(value.func, key)


def _is(node: ast.AST, key: Key) -> bool:
    """True for the name of the function, or `self.` and the name of the method."""
    if len(key) == 1:
        return isinstance(node, ast.Name) and node.id == key[0].__name__
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return own and node.attr == key[1]  # type: ignore[attr-defined]


def _named(step: ast.stmt, key: Key) -> int:
    return sum(_is(node, key) for node in ast.walk(step))


def _replaced(steps: list[ast.stmt], call: ast.stmt, entry: Specialised) -> list[ast.stmt] | None:
    """The statements with those of the method in place of its call; None if a name would mean two things."""
    assert isinstance(call, ast.Assign | ast.Return)
    assert isinstance(call.value, ast.Call)
    given = dict(zip(entry.parameters, call.value.args, strict=False))
    given |= {one.arg: one.value for one in call.value.keywords if one.arg}
    outer = {name for step in steps for name in reads(step)}
    renamed: dict[str, ast.expr] = {
        name: value for name, value in given.items() if isinstance(value, ast.Name) and value.id != name
    }
    local = {name for step in entry.body for name in reads(step)} - set(entry.uses) - {"self"}
    if any(name in outer and not _same(given.get(name), name) for name in local):
        return None
    assigned = {name for step in entry.body for name in stored(step)}
    if assigned & set(renamed) or set(given) != set(entry.parameters):
        return None
    first = [
        ast.Assign([ast.Name(name)], value, lineno=0)
        for name, value in given.items()
        if not _same(value, name) and name not in renamed
    ]
    body = [Replaced(renamed).visit(copy.deepcopy(step)) for step in entry.body]
    last = copy.deepcopy(call)
    last.value = body[-1].value
    return _swapped(steps, call, [*first, *body[:-1], last])


def _same(value: ast.expr | None, name: str) -> bool:
    return isinstance(value, ast.Name) and value.id == name


def _swapped(steps: list[ast.stmt], old: ast.stmt, new: list[ast.stmt]) -> list[ast.stmt]:
    made: list[ast.stmt] = []
    for step in steps:
        if step is old:
            made += new
            continue
        step = copy.copy(step)
        for name in ("body", "orelse"):
            if hasattr(step, name):
                setattr(step, name, _swapped(getattr(step, name), old, new))
        made.append(step)
    return made

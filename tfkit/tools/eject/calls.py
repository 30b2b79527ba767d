"""Calls: of modules, of functions that are specialised with their caller, and of a library's, which stay."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn import functional as F

import tfkit.nn
from tfkit.tools.eject.alike import is_torch
from tfkit.tools.eject.code import is_library
from tfkit.tools.eject.conditions import Written
from tfkit.tools.eject.expressions import Expressions
from tfkit.tools.eject.inline import expression
from tfkit.tools.eject.specialise import Key, refuse
from tfkit.tools.eject.torch_modules import STANDS_FOR
from tfkit.tools.eject.values import SOME, Items, Known, Method, Modules, Record, Value, join


def call(here: Expressions, node: ast.Call) -> Written:
    """Evaluate a call."""
    if isinstance(node.func, ast.Attribute) and node.func.attr == "append" and isinstance(node.func.value, ast.Name):
        return _append(here, node, node.func.value.id)
    function, written = here.eval(node.func)
    if isinstance(function, Modules):
        ours = [one for one in function.modules if not (is_torch(one) or type(one) in STANDS_FOR)]
        if len(ours) == len(function.modules):
            return _specialised(here, here.whole.keys(ours, "forward"), node, written)
        if ours:
            raise refuse(ours[0], f"it stands in the same place as {type(function.modules[0]).__name__}")
    if isinstance(function, Method):
        return _method(here, function, node, written)
    if isinstance(function, Known):
        return _known(here, function.value, node, written)
    return _opaque(here, node, written)


def _opaque(here: Expressions, node: ast.Call, written: ast.expr) -> Written:
    """A call of which nothing is known but that it does not return None."""
    made = here._any(ast.Call(ast.Constant(None), node.args, node.keywords))[1]
    assert isinstance(made, ast.Call)
    made.func = written
    return SOME, made


def _append(here: Expressions, node: ast.Call, name: str) -> Written:
    value, written = here.eval(node.args[0])
    known = here.env.get(name)
    here.env[name] = Items(join(known.item, value) if isinstance(known, Items) and known.item else value)
    return SOME, ast.Call(ast.Attribute(ast.Name(name), "append"), [written], [])


def _method(here: Expressions, method: Method, node: ast.Call, written: ast.expr) -> Written:
    module = method.modules[0]
    function = getattr(type(module), method.name)
    if is_library(function):
        if method.name == "values" and isinstance(module, nn.ModuleDict):
            return Items(here.items_of(Modules(method.modules))), ast.Call(written, [], [])
        return _opaque(here, node, written)
    return _specialised(here, here.whole.keys(method.modules, method.name), node, written)


def _known(here: Expressions, function: Any, node: ast.Call, written: ast.expr) -> Written:
    if function is tfkit.nn.is_scripting:
        return Known(False, literal=True), ast.Constant(False)
    if isinstance(function, FunctionType) and not is_library(function):
        return _specialised(here, [(function,)], node, written)
    if isinstance(function, type) and issubclass(function, tuple) and hasattr(function, "_fields"):
        return _record(here, function, node, written)
    arguments = [here.eval(one) for one in node.args]
    if function is enumerate:
        return Items(Record(None, (SOME, here.item_of(arguments[0][0])))), _rebuilt(written, arguments)
    if function is zip:
        items = tuple(here.item_of(value) for value, _ in arguments)
        return Items(Record(None, items)), _opaque(here, node, written)[1]
    if function is range and all(isinstance(value, Known) for value, _ in arguments) and len(arguments) == 1:
        count = arguments[0][0]
        assert isinstance(count, Known)
        return Known(range(count.value)), _rebuilt(written, arguments)
    if function is len and isinstance(arguments[0][0], Known):
        return Known(len(arguments[0][0].value)), _rebuilt(written, arguments)
    if getattr(function, "__name__", "") == "dropout" and len(arguments) > 1 and arguments[1][0] == Known(0.0):
        return arguments[0]
    return _without_defaults(function, _opaque(here, node, written))


def _rebuilt(written: ast.expr, arguments: list[Written]) -> ast.expr:
    return ast.Call(written, [one for _, one in arguments], [])


_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}


def _without_defaults(function: Any, result: Written) -> Written:
    """Leave out what `scaled_dot_product_attention`, whose signature cannot be asked for, has as default."""
    value, made = result
    if getattr(function, "__name__", "") == "scaled_dot_product_attention" and isinstance(made, ast.Call):
        made.keywords = [
            one
            for one in made.keywords
            if not (isinstance(one.value, ast.Constant) and _DEFAULTS.get(one.arg or "", ...) == one.value.value)
        ]
    if function is F.linear and isinstance(made, ast.Call) and isinstance(last := made.args[-1], ast.Constant):
        made.args = made.args[: -1 if last.value is None else None]
    return value, made


def _bound(here: Expressions, names: list[str], node: ast.Call) -> tuple[dict[str, Written], int]:
    """The arguments of a call by the names of the parameters, and how many of them come without it."""
    found: dict[str, Written] = {}
    rest = iter(names)
    for argument in node.args:
        value, written = here.eval(argument)
        if isinstance(argument, ast.Starred) and isinstance(value, Record):
            assert isinstance(written, ast.Starred)
            for index, item in enumerate(value.items):  # they come together: none of them can be left out
                item = Known(item.value) if isinstance(item, Known) else item
                found[next(rest)] = item, (written if index == 0 else ast.Constant(...))
        else:
            found[next(rest)] = value, written
    positional = len(found)
    for keyword in node.keywords:
        assert keyword.arg is not None, "a forward passes no **kwargs"
        found[keyword.arg] = here.eval(keyword.value)
    return found, positional


def _written(
    given: Mapping[str, Written], left: list[str], positional: int
) -> tuple[list[ast.expr], list[ast.keyword]]:
    """The arguments for the parameters that are left."""
    args: list[ast.expr] = []
    keywords: list[ast.keyword] = []
    for index, (name, (_, written)) in enumerate(given.items()):
        if name not in left or (isinstance(written, ast.Constant) and written.value is ...):
            continue
        if index < positional:
            args.append(written)
        else:
            keywords.append(ast.keyword(name, written))
    return args, keywords


def _specialised(here: Expressions, keys: list[Key], node: ast.Call, written: ast.expr) -> Written:
    entry = here.whole._entry(keys[0])
    given, positional = _bound(here, list(entry.code.parameters), node)
    if any(isinstance(argument, ast.Starred) for argument in node.args):
        entry.needed |= set(list(given)[:positional])
    value = here.whole.call(keys, {name: found for name, (found, _) in given.items()})
    entries = [here.whole.functions[key] for key in keys]
    if all(one.returns is not None for one in entries) and len({one.returns for one in entries}) == 1:
        returned = entries[0].returns
        if returned in given:
            return given[returned]
    if isinstance(keys[0][0], nn.Module) and keys[0][1] == "forward":
        body = expression(entries, {name: one for name, (_, one) in given.items()})
        if body is not None:
            here.uses |= entries[0].uses
            return value, body
    args, keywords = _written(given, entries[0].parameters, positional)
    return value, ast.Call(written, args, keywords)


def _record(here: Expressions, kind: type, node: ast.Call, written: ast.expr) -> Written:
    names: list[str] = list(kind._fields)  # type: ignore[attr-defined]
    given, positional = _bound(here, names, node)
    defaults: Mapping[str, Any] = kind._field_defaults  # type: ignore[attr-defined]
    items: list[Value] = [given[name][0] if name in given else Known(defaults[name], literal=True) for name in names]
    value = here.whole.record(kind, items)
    if (only := here.whole.alone(kind)) is not None:
        return value, given[only][1] if only in given else ast.Constant(defaults[only])
    args, keywords = _written(given, here.whole.fields(kind), positional)
    return value, ast.Call(written, args, keywords)

"""Calls of modules, of functions that are specialised with their caller, and of library functions, which stay."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn import functional as F

import tfkit.nn
from tfkit.tools.eject.call_graph import Key, refuse
from tfkit.tools.eject.code import is_library
from tfkit.tools.eject.conditions import Written
from tfkit.tools.eject.expressions import Expressions
from tfkit.tools.eject.inline import expression
from tfkit.tools.eject.same_modules import is_torch
from tfkit.tools.eject.torch_modules import STANDS_FOR
from tfkit.tools.eject.values import SOME, Items, Known, Method, Modules, Record, Value, join, join_all


class Calls(Expressions):
    """Evaluates the calls of one function."""

    def _call(self, node: ast.Call) -> Written:
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr == "append"
            and isinstance(node.func.value, ast.Name)
        ):
            return self._append(node, node.func.value.id)
        function, written = self.eval(node.func)
        if isinstance(function, Modules):
            return self._modules(function.modules, node, written)
        if isinstance(function, Method):
            return self._method(function, node, written)
        if isinstance(function, Known):
            return self._known(function.value, node, written)
        return self._opaque(node, written)

    def _modules(self, modules: tuple[nn.Module, ...], node: ast.Call, written: ast.expr) -> Written:
        """A call of one of these modules. Modules that are not alike all get the arguments as the call writes them."""
        ours = [one for one in modules if not (is_torch(one) or type(one) in STANDS_FOR)]
        keys = self.whole.keys(ours, "forward")
        if len(ours) == len(modules) and len({tuple(self.whole.entry(key).code.parameters) for key in keys}) == 1:
            return self._specialised(keys, node, written)
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            raise refuse(modules[0], "modules that are not alike are called with a `*`")
        args = [self.eval(one)[0] for one in node.args]
        keywords = {one.arg: self.eval(one.value)[0] for one in node.keywords if one.arg}
        value = join_all(self._passed(module, args, keywords) for module in modules)
        return value, self._opaque(node, written)[1]

    def _passed(self, module: nn.Module, args: Sequence[Value], keywords: Mapping[str, Value]) -> Value:
        """The result of a module that gets all these arguments, as far as it is known."""
        if type(module) is nn.Sequential:
            passed = list(args)
            for child in module:
                passed = [self._passed(self.whole.alikes[child], passed, {})]
            return passed[0]
        if is_torch(module) or type(module) in STANDS_FOR:
            return SOME
        key = self.whole.keys([module], "forward")[0]
        entry = self.whole.entry(key)
        given = dict(zip(entry.code.parameters, args, strict=False)) | dict(keywords)
        entry.needed |= set(given)
        return self.whole.call([key], {name: _not_written(value) for name, value in given.items()})

    def _opaque(self, node: ast.Call, written: ast.expr) -> Written:
        """A call about which nothing is known except that it does not return None."""
        made = self._any(ast.Call(ast.Constant(None), node.args, node.keywords))[1]
        assert isinstance(made, ast.Call)
        made.func = written
        return SOME, made

    def _append(self, node: ast.Call, name: str) -> Written:
        value, written = self.eval(node.args[0])
        known = self.env.get(name)
        self.env[name] = Items(join(known.item, value) if isinstance(known, Items) and known.item else value)
        return SOME, ast.Call(ast.Attribute(ast.Name(name), "append"), [written], [])

    def _method(self, method: Method, node: ast.Call, written: ast.expr) -> Written:
        module = method.modules[0]
        function = getattr(type(module), method.name)
        if is_library(function):
            if method.name in ("values", "items") and isinstance(module, nn.ModuleDict):
                child = self.items_of(Modules(method.modules))
                return Items(child if method.name == "values" else Record(None, (SOME, child))), ast.Call(
                    written, [], []
                )
            return self._opaque(node, written)
        return self._specialised(self.whole.keys(method.modules, method.name), node, written)

    def _known(self, function: Any, node: ast.Call, written: ast.expr) -> Written:
        if function in (tfkit.nn.is_scripting, tfkit.nn.can_look):
            return Known(False, literal=True), ast.Constant(False)
        if function is tfkit.nn.within:  # the limit is not a size of the model: the config of its file lacks it
            return self.eval(node.args[0])
        if isinstance(function, FunctionType) and not is_library(function):
            return self._specialised([(function,)], node, written)
        if isinstance(function, type) and issubclass(function, tuple) and hasattr(function, "_fields"):
            return self._record(function, node, written)
        arguments = [self.eval(one) for one in node.args]
        if function is enumerate:
            return Items(Record(None, (SOME, self.item_of(arguments[0][0])))), _rebuilt(written, arguments)
        if function in (list, tuple, reversed):
            return Items(self.item_of(arguments[0][0])), _rebuilt(written, arguments)
        if function is zip:
            items = tuple(self.item_of(value) for value, _ in arguments)
            return Items(Record(None, items)), self._opaque(node, written)[1]
        if function is range and all(isinstance(value, Known) for value, _ in arguments) and len(arguments) == 1:
            count = arguments[0][0]
            assert isinstance(count, Known)
            return Known(range(count.value)), _rebuilt(written, arguments)
        if function is len and isinstance(arguments[0][0], Known):
            return Known(len(arguments[0][0].value)), _rebuilt(written, arguments)
        if getattr(function, "__name__", "") == "dropout" and len(arguments) > 1 and arguments[1][0] == Known(0.0):
            return arguments[0]
        return _without_defaults(function, self._opaque(node, written))

    def _bound(self, names: list[str], node: ast.Call) -> tuple[dict[str, Written], int]:
        """The arguments of a call by the names of the parameters, and the number of positional ones."""
        found: dict[str, Written] = {}
        rest = iter(names)
        for argument in node.args:
            value, written = self.eval(argument)
            if isinstance(argument, ast.Starred) and isinstance(value, Record):
                assert isinstance(written, ast.Starred)
                for index, item in enumerate(value.items):  # they are passed together: none of them can be left out
                    found[next(rest)] = _not_written(item), (written if index == 0 else ast.Constant(...))
            else:
                found[next(rest)] = value, written
        positional = len(found)
        for keyword in node.keywords:
            assert keyword.arg is not None, "a forward passes no **kwargs"
            found[keyword.arg] = self.eval(keyword.value)
        return found, positional

    def _specialised(self, keys: list[Key], node: ast.Call, written: ast.expr) -> Written:
        entry = self.whole.entry(keys[0])
        given, positional = self._bound(list(entry.code.parameters), node)
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            entry.needed |= set(list(given)[:positional])
        value = self.whole.call(keys, {name: found for name, (found, _) in given.items()})
        entries = [self.whole.functions[key] for key in keys]
        if all(one.returns is not None for one in entries) and len({one.returns for one in entries}) == 1:
            returned = entries[0].returns
            if returned in given:
                return given[returned]
        if isinstance(keys[0][0], nn.Module) and keys[0][1] == "forward":
            body = expression(entries, {name: one for name, (_, one) in given.items()})
            if body is not None:
                self.uses |= entries[0].uses
                return value, body
        args, keywords = _written(given, entries[0].parameters, positional)
        return value, ast.Call(written, args, keywords)

    def _record(self, kind: type, node: ast.Call, written: ast.expr) -> Written:
        names: list[str] = list(kind._fields)  # type: ignore[attr-defined]
        given, positional = self._bound(names, node)
        defaults: Mapping[str, Any] = kind._field_defaults  # type: ignore[attr-defined]
        for name in names:
            given.setdefault(name, (Known(defaults.get(name), literal=True), ast.Constant(defaults.get(name))))
        value = self.whole.record(kind, [given[name][0] for name in names])
        if (only := self.whole.alone(kind)) is not None:
            return value, given[only][1]
        args, keywords = _written(given, self.whole.fields(kind), positional)
        return value, ast.Call(written, args, keywords)


def _not_written(value: Value) -> Value:
    """A value that is passed as an argument even if it is a constant."""
    return Known(value.value) if isinstance(value, Known) else value


def _rebuilt(written: ast.expr, arguments: list[Written]) -> ast.expr:
    return ast.Call(written, [one for _, one in arguments], [])


_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}


def _without_defaults(function: Any, result: Written) -> Written:
    """Leave out the defaults of `scaled_dot_product_attention`, which has no signature that Python can inspect."""
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

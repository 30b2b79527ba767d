"""Calls of modules, of functions that are specialised with their caller, and of library functions, which stay."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn import functional as F

import tfkit.nn
from tfkit.tools.eject.cleanup import Replaced, is_path
from tfkit.tools.eject.code import Key, is_library, refuse
from tfkit.tools.eject.conditions import Written
from tfkit.tools.eject.expressions import Expressions
from tfkit.tools.eject.torch_modules import has_torch_class
from tfkit.tools.eject.values import SOME, Items, Known, Method, Modules, Record, Value, join, join_all
from tfkit.tools.eject.whole import Called


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
        return SOME, self._opaque(node, written)[1]

    def _modules(self, modules: tuple[nn.Module, ...], node: ast.Call, written: ast.expr) -> Written:
        """Call one of several modules. If the modules are not equal, all get the arguments as the call writes them."""
        keys: list[Key] = [(module, "forward") for module in modules if not has_torch_class(module)]
        if len(keys) == len(modules) and len({tuple(self.whole.function(key).code.parameters) for key in keys}) == 1:
            return self._specialised(keys, node, written)
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            raise refuse(modules[0], "modules that are not alike are called with a `*`")
        args, call = self._opaque(node, written)
        keywords = {keyword.arg: self.eval(keyword.value)[0] for keyword in node.keywords if keyword.arg}
        return join_all(self._passed(module, args, keywords) for module in modules), call

    def _passed(self, module: nn.Module, args: Sequence[Value], keywords: Mapping[str, Value]) -> Value:
        """Return the result of a module that receives these arguments, as far as it is known."""
        if type(module) is nn.Sequential:
            passed = list(args)
            for child in module:
                passed = [self._passed(child, passed, {})]
            return passed[0]
        if has_torch_class(module):
            return SOME
        function = self.whole.function((module, "forward"))
        values = dict(zip(function.code.parameters, args, strict=False)) | dict(keywords)
        function.needed |= set(values)
        return self.whole.call([(module, "forward")], {name: _not_written(value) for name, value in values.items()})

    def _opaque(self, node: ast.Call, written: ast.expr) -> tuple[list[Value], ast.Call]:
        """Return the values of the positional arguments, and the call with its arguments specialised."""
        values = [self.eval(argument) for argument in node.args]
        keywords = [ast.keyword(keyword.arg, self.written(keyword.value)) for keyword in node.keywords]
        return [value for value, _ in values], ast.Call(written, [text for _, text in values], keywords)

    def _append(self, node: ast.Call, name: str) -> Written:
        value, written = self.eval(node.args[0])
        previous = self.env.get(name)
        self.env[name] = Items(join(previous.item, value) if isinstance(previous, Items) and previous.item else value)
        return SOME, ast.Call(ast.Attribute(ast.Name(name), "append"), [written], [])

    def _method(self, method: Method, node: ast.Call, written: ast.expr) -> Written:
        module = method.modules[0]
        if not is_library(getattr(type(module), method.name)):
            return self._specialised([(owner, method.name) for owner in method.modules], node, written)
        value: Value = SOME
        if method.name in ("values", "items") and isinstance(module, nn.ModuleDict):
            child = self.items_of(Modules(method.modules))
            value = Items(child if method.name == "values" else Record(None, (SOME, child)))
        return value, self._opaque(node, written)[1]

    def _known(self, function: Any, node: ast.Call, written: ast.expr) -> Written:
        if function in (tfkit.nn.is_scripting, tfkit.nn.can_look):
            return Known(False, literal=True), ast.Constant(False)
        if function is tfkit.nn.within:  # the limit is not a size of the model: the config of its file lacks it
            return self.eval(node.args[0])
        if isinstance(function, FunctionType) and not is_library(function):
            return self._specialised([(None, function)], node, written)
        if isinstance(function, type) and issubclass(function, tuple) and hasattr(function, "_fields"):
            return self._record(function, node, written)
        values, call = self._opaque(node, written)
        if function is isinstance and isinstance(values[0], Modules) and isinstance(values[1], Known):
            kinds = values[1].value
            outcomes = {isinstance(module, kinds) for module in values[0].modules}
            return (Known(outcomes.pop(), literal=True) if len(outcomes) == 1 else SOME), call
        if getattr(function, "__name__", "") == "dropout" and len(values) > 1 and values[1] == Known(0.0):
            return values[0], call.args[0]
        return self._of_library(function, values), _without_defaults(function, call)

    def _of_library(self, function: Any, values: list[Value]) -> Value:
        """Return the result of a function of Python or of torch, as far as it is known."""
        if function is zip:
            return Items(Record(None, tuple(map(self.item_of, values))))
        if len(values) != 1:
            return SOME
        (value,) = values
        if function is enumerate:
            return Items(Record(None, (SOME, self.item_of(value))))
        if function in (list, tuple, reversed):
            return Items(self.item_of(value))
        return Known(function(value.value)) if function in (range, len) and isinstance(value, Known) else SOME

    def _bound(self, names: list[str], node: ast.Call) -> tuple[dict[str, Written], int]:
        """Return the arguments of a call by parameter name, and the number of positional arguments."""
        bound: dict[str, Written] = {}
        rest = iter(names)
        for argument in node.args:
            value, written = self.eval(argument)
            if isinstance(argument, ast.Starred) and isinstance(value, Record):
                assert isinstance(written, ast.Starred)
                for index, item in enumerate(value.items):  # they are passed together: none of them can be left out
                    bound[next(rest)] = _not_written(item), (written if index == 0 else _PASSED)
            else:
                bound[next(rest)] = value, written
        positional = len(bound)
        for keyword in node.keywords:
            assert keyword.arg is not None, "a forward passes no **kwargs"
            bound[keyword.arg] = self.eval(keyword.value)
        return bound, positional

    def _specialised(self, keys: list[Key], node: ast.Call, written: ast.expr) -> Written:
        functions = [self.whole.function(key) for key in keys]
        first = functions[0]
        arguments, positional = self._bound(list(first.code.parameters), node)
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            first.needed |= set(list(arguments)[:positional])
        value = self.whole.call(keys, {name: item for name, (item, _) in arguments.items()})
        returned = first.returns
        if (
            returned is not None
            and returned in arguments
            and all(function.returns == returned for function in functions)
        ):
            return arguments[returned]
        if first.module is not None and first.name == "forward":
            body = _inlined(functions, {name: argument for name, (_, argument) in arguments.items()})
            if body is not None:
                self.uses |= first.uses
                return value, body
        return value, _reduced(written, arguments, first.parameters, positional)

    def _record(self, kind: type, node: ast.Call, written: ast.expr) -> Written:
        names: list[str] = list(kind._fields)  # type: ignore[attr-defined]
        arguments, positional = self._bound(names, node)
        defaults: Mapping[str, Any] = kind._field_defaults  # type: ignore[attr-defined]
        for name in names:
            arguments.setdefault(name, (Known(defaults.get(name), literal=True), ast.Constant(defaults.get(name))))
        value = self.whole.record(kind, [arguments[name][0] for name in names])
        if (only := self.whole.alone(kind)) is not None:
            return value, arguments[only][1]
        return value, _reduced(written, arguments, self.whole.fields(kind), positional)


def _inlined(functions: Sequence[Called], arguments: Mapping[str, ast.expr]) -> ast.expr | None:
    """Return calls of modules as one expression of the arguments; None if there is no such expression."""
    first = functions[0]
    value = first.expression
    if value is None or any(function.attributes for function in functions):
        return None
    if any(function.expression is None or ast.dump(function.expression) != ast.dump(value) for function in functions):
        return None
    names = [node.id for node in ast.walk(value) if isinstance(node, ast.Name)]
    for name in first.parameters:
        if name not in arguments or (names.count(name) > 1 and not is_path(arguments[name])):
            return None
    return Replaced(arguments).visit(copy.deepcopy(value))


_PASSED = ast.Constant(...)
"""Stands for an argument that a `*` before it passes."""


def _not_written(value: Value) -> Value:
    """Return a value that is passed as an argument even if it is a constant."""
    return Known(value.value) if isinstance(value, Known) else value


_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}


def _without_defaults(function: Any, call: ast.Call) -> ast.Call:
    """Leave out the defaults of `scaled_dot_product_attention`, which has no signature that Python can inspect."""
    if getattr(function, "__name__", "") == "scaled_dot_product_attention":
        call.keywords = [
            keyword
            for keyword in call.keywords
            if not (
                isinstance(keyword.value, ast.Constant) and _DEFAULTS.get(keyword.arg or "", ...) == keyword.value.value
            )
        ]
    if function is F.linear and isinstance(last := call.args[-1], ast.Constant) and last.value is None:
        call.args.pop()
    return call


def _reduced(written: ast.expr, arguments: Mapping[str, Written], left: list[str], positional: int) -> ast.Call:
    """Return the call with the arguments of the remaining parameters, the first `positional` without their names."""
    kept = {name: argument for name, (_, argument) in arguments.items() if name in left and argument is not _PASSED}
    unnamed = list(arguments)[:positional]
    args = [argument for name, argument in kept.items() if name in unnamed]
    return ast.Call(
        written, args, [ast.keyword(name, argument) for name, argument in kept.items() if name not in unnamed]
    )

"""Specialises each function of a model to its configuration.

This is an abstract run of the forward. Every expression gets a `Value`, which represents the known facts, and is
rewritten. An `if` whose test is known is replaced by one branch. An argument that is the same constant in every call is
removed. Because functions may be called from several places, the run is repeated until the facts no longer change.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import einops
import torch
from torch import nn
from torch.nn import functional as F

import tfkit.nn
from tfkit.building.initialize import RESETS
from tfkit.errors import Diagnostic, SpecError
from tfkit.tools.eject import patterns
from tfkit.tools.eject.cleanup import Replaced, copied_tree, is_path, tidied_statements, variable_names
from tfkit.tools.eject.expressions import Expressions, Written, item_of, items_of
from tfkit.tools.eject.source import Key, code_of, ejection_error, is_library, method_of
from tfkit.tools.eject.torch_modules import CONTAINERS, has_torch_class
from tfkit.tools.eject.values import (
    ANY_VALUE,
    NONE,
    SOME_VALUE,
    AbstractValue,
    ConcreteValue,
    Items,
    Method,
    Modules,
    Records,
    RecordValue,
    fields_of,
    is_constant,
    join,
    join_all,
    truth_value,
    without_none,
)

ROUNDS = 12
Env = dict[str, AbstractValue]


class Specialiser:
    """Specialises all functions that the forward of a model reaches.

    Attributes:
        functions: the functions, each after the functions that it calls; after `run`, only those that are reached.
        records: the named tuples, with the values of their fields as far as they are known.
        read: the attributes of each module that other modules use.
        instead: replacements of functions and records, by the module and the name of the original.
        recorded: modules whose output hooks record: their calls are neither removed nor inlined.
    """

    def __init__(
        self, model: nn.Module, instead: Mapping[str, Any] | None = None, recorded: Collection[nn.Module] = ()
    ) -> None:
        self.model = model
        self.instead = instead or {}
        self.recorded = frozenset(recorded)
        self.functions: dict[Key, Function] = {}
        self.records = Records()
        self.read: dict[nn.Module, set[str]] = {}
        self._running: set[Key] = set()
        self._done: dict[Key, list[AbstractValue]] = {}

    def run(self, entries: Mapping[nn.Module, Mapping[str, AbstractValue]] | None = None) -> None:
        """Repeat the abstract run until nothing changes.

        Args:
            entries: the modules whose forward is called from outside, by default the model. Each has the known values
            of
                arguments, beyond whether they may be None.
        """
        calls = {module: self._inputs(module) | {**values} for module, values in (entries or {self.model: {}}).items()}
        for _ in range(ROUNDS):
            before = self._state()
            self._done.clear()
            for module, arguments in calls.items():
                self.call([(module, "forward")], arguments)
            if self._state() == before:
                break
        else:
            raise SpecError(Diagnostic("the forward of this model cannot be ejected: it is too complex"))
        self._resets()
        self.functions = {key: self.functions[key] for key in self._done}

    def _inputs(self, module: nn.Module) -> Env:
        """Return the arguments of a forward that is called from outside. All of them stay."""
        function = self.function((module, "forward"))
        parameters = function.code.parameters
        function.needed |= set(parameters)
        return {name: SOME_VALUE if value.default is value.empty else ANY_VALUE for name, value in parameters.items()}

    def _resets(self) -> None:
        """Specialise the methods that fill the parameters of modules."""
        for module in self.model.modules():
            names = [name for name in RESETS if isinstance(getattr(type(module), name, None), FunctionType)]
            if names and not has_torch_class(module):
                self.call([(module, names[0])], {})

    def _state(self) -> Any:
        functions = {
            key: (dict(function.arguments), function.result, function.returns, set(function.needed))
            for key, function in self.functions.items()
        }
        return functions, dict(self.records)

    def replaced(self, value: Any) -> Any:
        """Return the replacement of a function or class; any other object unchanged."""
        if not isinstance(value, FunctionType | type):
            return value
        return self.instead.get(f"{value.__module__}.{value.__qualname__}", value)

    def function(self, key: Key) -> Function:
        """Return the function of a key."""
        if key not in self.functions:
            self.functions[key] = Function(self, key)
        return self.functions[key]

    def call(self, keys: Sequence[Key], arguments: Mapping[str, AbstractValue]) -> AbstractValue:
        """Record a call of one of these functions, and return the known facts about its result."""
        functions = [self.function(key) for key in keys]
        for name, parameter in functions[0].code.parameters.items():
            default = parameter.default
            values = [function.arguments[name] for function in functions if name in function.arguments]
            values.append(
                arguments.get(
                    name, SOME_VALUE if isinstance(default, torch.Tensor) else ConcreteValue(default, literal=True)
                )
            )
            for function in functions:
                function.arguments[name] = join_all(values)
        for key in keys:
            self._update(key)
        needed = {name for function in functions for name in function.needed}
        for function in functions:
            function.needed |= needed
        return join_all(function.result for function in functions)

    def _update(self, key: Key) -> None:
        """Run a function again if the known facts about its arguments have changed."""
        function = self.functions[key]
        if key in self._running or self._done.get(key) == list(function.arguments.values()):
            return
        self._running.add(key)
        try:
            function.run()
        except SpecError:
            raise
        except Exception as cause:
            module, called = key
            raise ejection_error(called if module is None else module, f"{function.name}: {cause}") from cause
        self._running.discard(key)
        self._done[key] = list(function.arguments.values())


class Function(Expressions):
    """A function of the model, and its specialised form after `run`.

    Attributes:
        name: the name of the function or method.
        arguments: the value of each parameter; the parts that differ between calls are unknown.
        result: the returned value; parts of it may be unknown.
        needed: parameters that are read here, or by an alternative function of the same call.
        body: the remaining statements.
        attributes: the attributes of the module that they read, including parameters and children.
    """

    def __init__(self, specialiser: Specialiser, key: Key) -> None:
        module, called = key
        called_function = called if module is None else specialiser.replaced(method_of(module, called))
        code = code_of(called_function, method=module is not None)
        if specialiser.instead:
            code = replace(code, names={name: specialiser.replaced(value) for name, value in code.names.items()})
        if module is not None:
            code = replace(code, tree=patterns.with_patterns(code.tree, module))
        super().__init__(module, code, specialiser.records, specialiser.read)
        self.whole = specialiser
        self.name: str = called.__name__ if module is None else called
        self.arguments: Env = {}
        self.result: AbstractValue = SOME_VALUE
        self.needed: set[str] = set()
        self.body: list[ast.stmt] = []
        self.attributes: set[str] = set()

    def replaced(self, value: Any) -> Any:
        return self.whole.replaced(value)

    @property
    def parameters(self) -> list[str]:
        """The remaining parameters: constants are written where they are used, and unread parameters are removed."""
        return [name for name, value in self.arguments.items() if not is_constant(value) and name in self.needed]

    @property
    def expression(self) -> ast.expr | None:
        """The returned expression, if the function only returns an expression."""
        only = self.body[0] if len(self.body) == 1 else None
        return only.value if isinstance(only, ast.Return) else None

    @property
    def returns(self) -> str | None:
        """The parameter that the function only returns, if it does nothing else. Such calls are removed."""
        value = None if self.module in self.whole.recorded else self.expression
        return value.id if isinstance(value, ast.Name) and value.id in self.code.parameters else None

    def run(self) -> None:
        """Specialise the function to the known facts about its arguments."""
        self.env = dict(self.arguments)
        self.uses = {}
        self.exits: list[Env] = []
        self.results: list[AbstractValue] = []
        body = self.block(self.code.tree.body)
        self.set_body([*self._first_values(body), *body])
        self.result = join_all(self.results) if self.results else NONE
        self.needed |= {name for step in self.body for name in variable_names(step)}

    def _first_values(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return assignments of removed parameters that the body also assigns."""
        constants = {name: value.value for name, value in self.arguments.items() if is_constant(value)}
        names: dict[str, None] = {}
        for step in body:
            names |= dict.fromkeys(
                variable_names(step.value if isinstance(step, ast.Assign) else step) & constants.keys()
            )
            if isinstance(step, ast.Assign):
                assigned = {name for target in step.targets for name in variable_names(target)}
                constants = {name: value for name, value in constants.items() if name in names or name not in assigned}
        return [ast.Assign([ast.Name(name)], ast.Constant(constants[name]), lineno=0) for name in names]

    def set_body(self, steps: list[ast.stmt]) -> None:
        """Tidy statements, and set them as the body."""
        self.body = tidied_statements(steps)
        nodes = [node for step in self.body for node in ast.walk(step)]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        self.uses = {name: value for name, value in self.uses.items() if name in names}
        self.attributes = {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.self_name
        }

    def block(self, steps: list[ast.stmt]) -> list[ast.stmt]:
        """Return the remaining statements."""
        statements: list[ast.stmt] = []
        for step in steps:
            statements += self.step(step)
            if _is_terminating(statements):
                break
        return statements

    def step(self, step: ast.stmt) -> list[ast.stmt]:  # noqa: C901  one case per type of statement
        """Return the remaining statements of a single statement."""
        if isinstance(step, ast.AnnAssign):
            return self.step(ast.Assign([step.target], step.value, lineno=0)) if step.value else []
        if isinstance(step, ast.Assign):
            value, written = self.eval(step.value)
            targets = [self._target(self._left(target, value)) for target in step.targets]
            for target in step.targets:
                self.bind(target, value)
            return [ast.Assign(targets, written, lineno=0)]
        if isinstance(step, ast.AugAssign):
            target = self._target(step.target)
            assert isinstance(target, ast.Name | ast.Attribute | ast.Subscript)
            assignment = ast.AugAssign(target, step.op, self.written(step.value))
            self.bind(step.target, SOME_VALUE)
            return [assignment]
        if isinstance(step, ast.Return):
            value, returned = self.eval(step.value) if step.value else (NONE, None)
            self.results.append(value)
            return [ast.Return(returned)]
        if isinstance(step, ast.If):
            return self._if(step)
        if isinstance(step, ast.For):
            return self._for(step)
        if isinstance(step, ast.With):
            items = [ast.withitem(self.written(item.context_expr), item.optional_vars) for item in step.items]
            for item in step.items:
                self.bind(item.optional_vars or ast.Tuple([]), ANY_VALUE)
            return [ast.With(items, self.block(step.body), lineno=0)]
        if isinstance(step, ast.Assert):
            before, test = self.env, self.written(step.test)
            self.narrow(step.test, True)
            return [] if self.env is before else [ast.Assert(test)]
        if isinstance(step, ast.Break | ast.Continue):
            self.exits.append(dict(self.env))
            return [step]
        if isinstance(step, ast.Pass) or (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant)):
            return []
        if isinstance(step, ast.Expr) and isinstance(step.value, ast.Call):
            written = self._call(step.value)[1]  # `eval` would replace the call by its result, `None`
            return [] if isinstance(written, ast.Constant) else [ast.Expr(written)]
        if isinstance(step, ast.Expr | ast.Raise):
            return [self.rewritten(step)]
        raise NotImplementedError(f"a `{type(step).__name__.lower()}`")

    def _left(self, target: ast.expr, value: AbstractValue) -> ast.expr:
        """Return the target for unpacking a `NamedTuple`, without the names of removed fields."""
        record = without_none(value)
        if not (isinstance(target, ast.Tuple) and isinstance(record, RecordValue) and record.type is not None):
            return target
        left = self.records.left(record.type)
        names = [name for field, name in zip(fields_of(record.type), target.elts, strict=True) if field in left]
        return names[0] if len(names) == 1 else ast.Tuple(names)

    def _target(self, target: ast.expr) -> ast.expr:
        """Rewrite the target of an assignment. The object of an item or attribute is read."""
        if isinstance(target, ast.Tuple):
            return ast.Tuple([self._target(element) for element in target.elts])
        if isinstance(target, ast.Name):
            return ast.Name(target.id)
        return self.rewritten(target)

    def _if(self, step: ast.If) -> list[ast.stmt]:
        value, test = self.eval(step.test)
        if (outcome := truth_value(value)) is not None:
            if outcome:
                self.narrow(step.test, True)
            return self.block(step.body if outcome else step.orelse)
        before = dict(self.env)
        self.narrow(test, True)
        body = self.block(step.body)
        after_body, self.env = self.env, before
        self.narrow(test, False)
        orelse = self.block(step.orelse)
        if _is_terminating(orelse):
            self.env = after_body
        elif not _is_terminating(body):
            self.env = _joined_variables(after_body, self.env)
        return [ast.If(test, body, orelse)]

    def _for(self, step: ast.For) -> list[ast.stmt]:
        if step.orelse:
            raise NotImplementedError("a `for` with an `else`")
        value, written = self.eval(step.iter)
        exits = any(isinstance(node, ast.Break | ast.Continue) for node in ast.walk(step))
        if isinstance(value, ConcreteValue) and isinstance(value.value, range) and len(value.value) == 1 and not exits:
            self.bind(step.target, ConcreteValue(value.value[0], literal=True))
            return self.block(step.body)
        outer, self.exits = self.exits, []
        while True:
            before = dict(self.env)
            self.bind(step.target, item_of(value))
            body = self.block(step.body)
            after = before
            for env in [*([] if _is_terminating(body) else [self.env]), *self.exits]:
                after = _joined_variables(after, env)
            self.env = after
            if after == before:
                break
        self.exits = outer
        return [ast.For(step.target, written, body, [], lineno=0)]

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
        if isinstance(function, ConcreteValue):
            return self._known(function.value, node, written)
        return SOME_VALUE, self._opaque(node, written)[1]

    def _modules(self, modules: tuple[nn.Module, ...], node: ast.Call, written: ast.expr) -> Written:
        """Evaluate a call of one of several modules. If they differ, the call keeps all of its arguments."""
        keys: list[Key] = [(module, "forward") for module in modules if not has_torch_class(module)]
        if len(keys) == len(modules) and len({tuple(self.whole.function(key).code.parameters) for key in keys}) == 1:
            return self._specialised(keys, node, written)
        if keys:
            _check_no_star(node)
        args, call = self._opaque(node, written)
        keywords = {keyword.arg: self.eval(keyword.value)[0] for keyword in node.keywords if keyword.arg}
        return join_all(self._passed(module, args, keywords) for module in modules), call

    def _passed(
        self, module: nn.Module, args: Sequence[AbstractValue], keywords: Mapping[str, AbstractValue]
    ) -> AbstractValue:
        """Return the known facts about the result of a module for these arguments."""
        if type(module) is nn.Sequential:
            passed = list(args)
            for child in module:
                passed = [self._passed(child, passed, {})]
            return passed[0]
        if has_torch_class(module):
            return SOME_VALUE
        function = self.whole.function((module, "forward"))
        values = dict(zip(function.code.parameters, args, strict=False)) | dict(keywords)
        function.needed |= set(values)
        # The same call must fit all of these modules, so constants cannot be removed.
        arguments = {
            name: ConcreteValue(value.value) if isinstance(value, ConcreteValue) else value
            for name, value in values.items()
        }
        return self.whole.call([(module, "forward")], arguments)

    def _opaque(self, node: ast.Call, written: ast.expr) -> tuple[list[AbstractValue], ast.Call]:
        """Return the values of the positional arguments, and the call with its arguments specialised."""
        values = [self.eval(argument) for argument in node.args]
        keywords = [ast.keyword(keyword.arg, self.written(keyword.value)) for keyword in node.keywords]
        return [value for value, _ in values], ast.Call(written, [text for _, text in values], keywords)

    def _append(self, node: ast.Call, name: str) -> Written:
        value, written = self.eval(node.args[0])
        previous = self.env.get(name)
        self.env[name] = Items(join(previous.item, value) if isinstance(previous, Items) and previous.item else value)
        return SOME_VALUE, ast.Call(ast.Attribute(ast.Name(name), "append"), [written], [])

    def _method(self, method: Method, node: ast.Call, written: ast.expr) -> Written:
        module = method.modules[0]
        if not is_library(getattr(type(module), method.name)):
            return self._specialised([(owner, method.name) for owner in method.modules], node, written)
        value: AbstractValue = SOME_VALUE
        if method.name in ("values", "items"):
            child = items_of(Modules(method.modules))
            value = Items(child if method.name == "values" else RecordValue(None, (SOME_VALUE, child)))
        return value, self._opaque(node, written)[1]

    def _known(self, function: Any, node: ast.Call, written: ast.expr) -> Written:  # noqa: C901  one case per function
        if function is tfkit.nn.as_attention_mask and self.module is not None:  # files have no pairwise masks
            function, written = tfkit.nn.as_padding_mask, self.use("as_padding_mask", tfkit.nn.as_padding_mask)
        if function in (tfkit.nn.is_scripting, tfkit.nn.can_look, tfkit.nn.is_pairwise):
            return ConcreteValue(False, literal=True), ast.Constant(False)
        if function is tfkit.nn.check_max_len:  # the config of the file lacks the limit
            return self.eval(node.args[0])
        if isinstance(function, FunctionType) and function in _EINOPS:
            return self._einops(function, node)
        if isinstance(function, FunctionType) and not is_library(function):
            return self._specialised([(None, function)], node, written)
        if isinstance(function, type) and issubclass(function, tuple) and hasattr(function, "_fields"):
            return self._record(function, node, written)
        values, call = self._opaque(node, written)
        # The classes of the file derive only from nn.Module, so the test could have a different result there.
        if function is isinstance and isinstance(values[0], Modules) and isinstance(values[1], ConcreteValue):
            outcomes = {isinstance(module, values[1].value) for module in values[0].modules}
            return (ConcreteValue(outcomes.pop(), literal=True) if len(outcomes) == 1 else SOME_VALUE), call
        if function is len and isinstance(values[0], Modules):
            sizes = {len(module) for module in values[0].modules if isinstance(module, CONTAINERS)}
            return (ConcreteValue(sizes.pop(), literal=True) if len(sizes) == 1 else SOME_VALUE), call
        if function is len and isinstance(values[0], ConcreteValue) and isinstance(values[0].value, list):
            return ConcreteValue(len(values[0].value), literal=True), call
        if getattr(function, "__name__", "") == "dropout" and len(values) > 1 and values[1] == ConcreteValue(0.0):
            return values[0], call.args[0]
        return _library_result(function, values), _without_defaults(function, call)

    def _einops(self, function: FunctionType, node: ast.Call) -> Written:
        """Evaluate a call of a function of einops, which becomes operations of torch."""
        _check_no_star(node)
        parameters = inspect.signature(function).parameters
        names = [*map(str, range(len(node.args) - 1)), "pattern"] if function is einops.einsum else [*parameters]
        arguments = dict(zip(names, node.args, strict=False)) | {key.arg: key.value for key in node.keywords if key.arg}
        pattern = _constant_text(self.eval(arguments.pop("pattern"))[0])
        if function is einops.einsum:
            equation = ast.Constant(patterns.equation_of(pattern))
            name = ast.Attribute(self.use("torch", torch), "einsum")
            call = ast.Call(name, [equation, *map(self.written, arguments.values())], [])
            return SOME_VALUE, patterns.set_pattern(call, pattern)
        if function in (einops.pack, einops.unpack):
            plain, count = (patterns.pack, 2) if function is einops.pack else (patterns.unpack, 1)
            sizes = [ast.Constant(len(side.split())) for side in pattern.split("*")]
            call = ast.Call(node.func, [*arguments.values(), *sizes[:count]], [])
            value, written = self._specialised([(None, plain)], call, self.use(plain.__name__, plain))
            return value, patterns.set_pattern(written, pattern)
        value, tensor = self.eval(arguments.pop("tensor"))
        if isinstance(without_none(value), Items):
            tensor = ast.Call(ast.Attribute(self.use("torch", torch), "stack"), [tensor], [])
        reduction = arguments.pop("reduction", ast.Constant(function.__name__))
        sizes_by_axis = {axis: self.written(size) for axis, size in arguments.items()}
        return SOME_VALUE, patterns.call_of(_constant_text(self.eval(reduction)[0]), tensor, pattern, sizes_by_axis)

    def _bound(self, names: Sequence[str], node: ast.Call) -> dict[str, Written]:
        """Return the arguments of a call by parameter name."""
        _check_no_star(node)
        arguments = dict(zip(names, map(self.eval, node.args), strict=False))
        return arguments | {keyword.arg: self.eval(keyword.value) for keyword in node.keywords if keyword.arg}

    def _specialised(self, keys: list[Key], node: ast.Call, written: ast.expr) -> Written:
        functions = [self.whole.function(key) for key in keys]
        first = functions[0]
        arguments = self._bound([*first.code.parameters], node)
        value = self.whole.call(keys, {name: argument for name, (argument, _) in arguments.items()})
        if (returned := first.returns) in arguments and all(function.returns == returned for function in functions):
            argument, text = arguments[returned]
            # A `NamedTuple` with a single remaining field is replaced by the field: either may be the argument.
            return argument if _record_type(value) is _record_type(argument) else value, text
        if value == NONE and not any(function.body for function in functions):
            return value, ast.Constant(None)
        if first.module not in (None, *self.whole.recorded) and first.name == "forward":
            body = _inlined_expression(functions, {name: argument for name, (_, argument) in arguments.items()})
            if body is not None:
                self.uses |= first.uses
                return value, body
        return value, _reduced_call(written, arguments, first.parameters, len(node.args))

    def _record(self, kind: type, node: ast.Call, written: ast.expr) -> Written:
        defaults: Mapping[str, Any] = kind._field_defaults  # type: ignore[attr-defined]
        names = fields_of(kind)
        missing = {
            name: (ConcreteValue(defaults.get(name), literal=True), ast.Constant(defaults.get(name))) for name in names
        }
        arguments: dict[str, Written] = self._bound(names, node)
        arguments |= {name: default for name, default in missing.items() if name not in arguments}
        value = self.records.add(kind, [arguments[name][0] for name in names])
        if (only := self.records.alone(kind)) is not None:
            return value, arguments[only][1]
        return value, _reduced_call(written, arguments, self.records.left(kind), len(node.args))


def _library_result(function: Any, values: list[AbstractValue]) -> AbstractValue:
    """Return the known facts about the result of a function of Python or torch. Only torch's are never None."""
    if isinstance(function, FunctionType) and not (function.__module__ or "").startswith("torch"):
        return ANY_VALUE
    if function is zip:
        return Items(RecordValue(None, tuple(map(item_of, values))))
    if len(values) != 1:
        return SOME_VALUE
    (value,) = values
    if function is enumerate:
        return Items(RecordValue(None, (SOME_VALUE, item_of(value))))
    if function in (list, tuple, reversed):
        return Items(item_of(value))
    return (
        ConcreteValue(function(value.value))
        if function in (range, len) and isinstance(value, ConcreteValue)
        else SOME_VALUE
    )


def _record_type(value: AbstractValue) -> type | None:
    """Return the type of a `NamedTuple`; None for any other value."""
    record = without_none(value)
    return record.type if isinstance(record, RecordValue) else None


_EINOPS = (einops.rearrange, einops.repeat, einops.reduce, einops.einsum, einops.pack, einops.unpack)


def _constant_text(value: AbstractValue) -> str:
    if isinstance(value, ConcreteValue) and isinstance(value.value, str):
        return value.value
    raise NotImplementedError("a pattern or a reduction of einops that is not a constant text")


def _check_no_star(node: ast.Call) -> None:
    """Raise NotImplementedError for a call with `*` or `**`, whose parameters are unknown."""
    if any(isinstance(argument, ast.Starred) for argument in node.args) or None in [key.arg for key in node.keywords]:
        raise NotImplementedError("a `*` or a `**` in the call of a module or of a function")


def _is_terminating(steps: list[ast.stmt]) -> bool:
    """Return True if code after these statements is unreachable."""
    last = steps[-1] if steps else None
    if isinstance(last, ast.If):
        return _is_terminating(last.body) and _is_terminating(last.orelse)
    return isinstance(last, ast.Return | ast.Raise | ast.Break | ast.Continue)


def _joined_variables(a: Env, b: Env) -> Env:
    """Join the variables at the end of two branches. A list may contain the items that either branch appends."""
    return {
        name: join(a[name], b[name]) if name in a and name in b else _uncertain_value(a.get(name, b.get(name)))
        for name in {**a, **b}
    }


def _uncertain_value(value: AbstractValue | None) -> AbstractValue:
    if value is not None and is_constant(value):
        return ConcreteValue(value.value)
    return value or Items(None)


def _inlined_expression(functions: Sequence[Function], arguments: Mapping[str, ast.expr]) -> ast.expr | None:
    """Return the call of modules as an expression of the arguments; None if there is no such expression."""
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
    return Replaced(arguments).visit(copied_tree(value))


_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}


def _without_defaults(function: Any, call: ast.Call) -> ast.Call:
    """Remove the defaults of `scaled_dot_product_attention`, whose signature Python cannot inspect."""
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


def _reduced_call(
    written: ast.expr, arguments: Mapping[str, Written], left: Sequence[str], positional: int
) -> ast.Call:
    """Return the call with the arguments of the remaining parameters; the first `positional` have no names."""
    texts = [(index, name, text) for index, (name, (_, text)) in enumerate(arguments.items()) if name in left]
    args = [text for index, _, text in texts if index < positional]
    return ast.Call(written, args, [ast.keyword(name, text) for index, name, text in texts if index >= positional])

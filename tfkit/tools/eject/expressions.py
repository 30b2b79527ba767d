"""Expressions: their values as far as they are known, and their text once the known parts are decided."""

from __future__ import annotations

import ast
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tfkit.nn
from tfkit.tools.eject.code import Key, code_of, method_of
from tfkit.tools.eject.conditions import Conditions, Written, literal
from tfkit.tools.eject.rearranged import with_patterns
from tfkit.tools.eject.symbols import Named
from tfkit.tools.eject.values import SOME, Items, Known, Method, Modules, Record, Value, join_all
from tfkit.tools.eject.whole import Whole


class Expressions(Conditions):
    """Evaluates the expressions of one function.

    Attributes:
        whole: the functions of the model.
        module: the module, if the function is a method.
        name: the name of the function, or of the method.
        code: the source, in which calls of rearrangements are written out.
        self_name: the name of the module in it.
        uses: the names that it reads from outside, with the objects that they stand for.
    """

    def __init__(self, whole: Whole, key: Key) -> None:
        self.whole = whole
        self.module, called = key
        self.self_name: str | None = None
        if self.module is None:
            self.name = called.__name__
            self.code = code_of(called, method=False)
        else:
            self.name = called
            self.code = code_of(method_of(self.module, called), method=True)
            self.self_name = self.code.tree.args.args[0].arg
            self.code = replace(self.code, tree=with_patterns(self.code.tree, self.module))
        self.env: dict[str, Value] = {}
        self.uses: dict[str, Any] = {}

    def _constant(self, node: ast.Constant) -> Written:
        return Known(node.value, literal=True), node

    def _name(self, node: ast.Name) -> Written:
        if node.id == self.self_name:
            assert self.module is not None
            return Modules((self.module,)), node
        if node.id in self.env:
            return self.env[node.id], ast.Name(node.id)
        if node.id not in self.code.names:
            raise NotImplementedError(f"nothing says what `{node.id}` is")
        value = self.code.names[node.id]
        value = F.linear if value is tfkit.nn.linear else value  # which computes the same
        return Known(value), self.use(node.id, value)

    def use(self, name: str, value: Any) -> ast.expr:
        """Record that an object from outside is read; it has one name in the whole file."""
        if value is F.linear:
            return ast.Attribute(self.use("F", F), "linear")
        if (isinstance(value, type) and value.__module__ == "builtins") or name in ("range", "len", "enumerate", "zip"):
            return ast.Name(name)
        name = getattr(value, "__name__", name) if isinstance(value, FunctionType | type) else name
        name = {torch: "torch", nn: "nn", F: "F"}.get(value, name) if isinstance(value, ModuleType) else name
        self.uses[name] = value
        return ast.Name(name)

    def _attribute(self, node: ast.Attribute) -> Written:
        base, written = self.eval(node.value)
        if isinstance(base, Modules):
            value = join_all(self._of_module(module, node.attr) for module in base.modules)
            if not (isinstance(node.value, ast.Name) and node.value.id == self.self_name):
                for module in base.modules:
                    self.whole.read.setdefault(module, set()).add(node.attr)
            return value, ast.Attribute(written, node.attr)
        if isinstance(base, Record) and base.type is not None and node.attr in base.type._fields:  # type: ignore[attr-defined]
            value = base.items[base.type._fields.index(node.attr)]  # type: ignore[attr-defined]
            return value, written if self.whole.alone(base.type) == node.attr else ast.Attribute(written, node.attr)
        if isinstance(base, Known):
            return self._of_known(base, node, written)
        return SOME, ast.Attribute(written, node.attr)

    def _of_known(self, base: Known, node: ast.Attribute, written: ast.expr) -> Written:
        value = getattr(base.value, node.attr)
        if base.value is F:
            written = self.use("F", F)
        elif not isinstance(base.value, ModuleType | type | torch.dtype | torch.device) and self.module is not None:
            written = ast.Attribute(written, node.attr)
            if isinstance(value, Enum):
                self.use(type(value).__name__, type(value))
            with suppress(NotImplementedError):
                written = literal(value)
            return self._of_module_value(value), written
        return Known(value), ast.Attribute(written, node.attr)

    def _of_module(self, module: nn.Module, name: str) -> Value:
        if name == "training":
            return SOME
        if name not in module.__dict__ and isinstance(getattr(type(module), name, None), FunctionType):
            return Method((module,), name)
        return self._of_module_value(getattr(module, name))

    def _of_module_value(self, value: Any) -> Value:
        if isinstance(value, nn.Module):
            return Modules((value,))
        if isinstance(value, torch.Tensor):
            return SOME
        # 0 and 1 get no names from the spec: they are switches, like True and False.
        switch = isinstance(value, int) and not isinstance(value, Named) and value in (0, 1)
        return Known(value, literal=value is None or isinstance(value, bool) or switch)

    def _subscript(self, node: ast.Subscript) -> Written:
        base, written = self.eval(node.value)
        index, index_written = self.eval(node.slice)
        subscript = ast.Subscript(written, index_written)
        if isinstance(base, Record) and isinstance(index, Known) and isinstance(index.value, int):
            return base.items[index.value], subscript
        if isinstance(base, Items):
            return base.item or SOME, subscript
        if isinstance(base, Known) and isinstance(base.value, list | tuple | dict) and base.value:
            if isinstance(index, Known):
                item = base.value[index.value]
                named = isinstance(item, FunctionType | BuiltinFunctionType | type)
                return Known(item), self.use(item.__name__, item) if named else subscript
            first, *rest = base.value
            if (
                isinstance(first, int)
                and not isinstance(base.value, dict)
                and all(Known(entry) == Known(first) for entry in rest)
            ):
                return Known(first, literal=True), subscript
        if isinstance(base, Modules):
            return self._items_at(base, node.slice, index), subscript
        return SOME, subscript

    def _items_at(self, base: Modules, node: ast.expr, index: Value) -> Value:
        """Return the items at an index of lists and mappings of modules."""
        if isinstance(node, ast.Slice):
            return Items(self.items_of(base))
        if not isinstance(index, Known):
            return self.items_of(base)
        items = tuple(dict.fromkeys(module[index.value] for module in base.modules))  # type: ignore[index]
        return Modules(items) if all(isinstance(item, nn.Module) for item in items) else SOME

    def items_of(self, container: Modules) -> Value:
        """Return the children of lists and mappings of modules; the tensors of lists and mappings of parameters."""
        children = tuple(dict.fromkeys(child for module in container.modules for child in module.children()))
        return Modules(children) if children else SOME

    def _starred(self, node: ast.Starred) -> Written:
        value, written = self.eval(node.value)
        return value, ast.Starred(written)

    def _joinedstr(self, node: ast.JoinedStr) -> Written:
        parts = [self.written(part) for part in node.values]
        texts = [str(part.value) for part in parts if isinstance(part, ast.Constant)]
        return SOME, ast.Constant("".join(texts)) if len(texts) == len(parts) else ast.JoinedStr(parts)

    def _formattedvalue(self, node: ast.FormattedValue) -> Written:
        """Return a value in an f-string; a known text becomes part of the string."""
        written = self.written(node.value)
        plain = node.conversion == -1 and node.format_spec is None
        if plain and isinstance(written, ast.Constant) and isinstance(written.value, str):
            return SOME, written
        return SOME, ast.FormattedValue(written, node.conversion, node.format_spec and self.written(node.format_spec))

    def _tuple(self, node: ast.Tuple) -> Written:
        items = [self.eval(element) for element in node.elts]
        return Record(None, tuple(value for value, _ in items)), ast.Tuple([written for _, written in items])

    def _list(self, node: ast.List) -> Written:
        items = [self.eval(element) for element in node.elts]
        item = join_all(value for value, _ in items) if items else None
        return Items(item), ast.List([written for _, written in items])

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp) -> Written:
        saved = dict(self.env)
        generators = [self._generator(generator) for generator in node.generators]
        value, written = self.eval(node.elt)
        self.env = saved
        return Items(value), type(node)(written, generators)

    _generatorexp = _listcomp

    def _generator(self, node: ast.comprehension) -> ast.comprehension:
        value, written = self.eval(node.iter)
        self.bind(node.target, self.item_of(value))
        return ast.comprehension(
            node.target, written, [self.written(condition) for condition in node.ifs], node.is_async
        )

    def item_of(self, value: Value) -> Value:
        """Return the value that the variable of a loop over `value` takes."""
        if isinstance(value, Modules):
            return self.items_of(value)
        if isinstance(value, Items):
            return value.item or SOME
        if isinstance(value, Record) and value.items:
            return join_all(value.items)
        return SOME

    def bind(self, target: ast.expr, value: Value) -> None:
        """Assign to names."""
        if isinstance(target, ast.Name):
            self.env[target.id] = value
        elif isinstance(target, ast.Tuple):
            several = value.items if isinstance(value, Record) and len(value.items) == len(target.elts) else None
            for index, element in enumerate(target.elts):
                self.bind(element, several[index] if several else SOME)

    def _lambda(self, node: ast.Lambda) -> Written:
        raise NotImplementedError("a `lambda`")

"""Expressions: their values as far as they are known, and their text once the known parts are decided."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tfkit.nn
from tfkit.tools.eject.call_graph import Specialised, Whole
from tfkit.tools.eject.conditions import Conditions, Written, literal
from tfkit.tools.eject.symbols import Named
from tfkit.tools.eject.values import NONE, SOME, Items, Known, Method, Modules, Record, Value, join_all

STANDS_FOR: dict[Any, Any] = {tfkit.nn.linear: F.linear}
"""Functions, each with the one of torch that computes the same."""


class Expressions(Conditions):
    """Evaluates the expressions of one function; `env` has its variables, as far as they are known."""

    def __init__(self, whole: Whole, entry: Specialised, module: nn.Module | None) -> None:
        self.whole = whole
        self.entry = entry
        self.module = module
        self.env: dict[str, Value] = {}
        self.uses: dict[str, Any] = {}
        self.renamed: dict[str, str] = {}
        parameters = entry.code.tree.args.args
        self.self_name = parameters[0].arg if module is not None else None

    def eval(self, node: ast.expr) -> Written:
        """The value of an expression, as far as it is known, and its text as a tree."""
        method: Callable[[Any], Written] | None = getattr(self, f"_{type(node).__name__.lower()}", None)
        value, written = method(node) if method else self._any(node)
        if isinstance(value, Known) and value.literal and not isinstance(node, ast.Constant):
            return value, ast.Constant(value.value)
        return value, written

    def written(self, node: ast.expr) -> ast.expr:
        """The text of an expression, as a tree."""
        return self.eval(node)[1]

    def _any(self, node: ast.expr) -> Written:
        """An expression about which nothing is known except its parts, and that it is not None."""
        made = type(node)(**{name: self._part(value) for name, value in ast.iter_fields(node)})
        return SOME, made

    def _part(self, part: Any) -> Any:
        if isinstance(part, list):
            return [self._part(one) for one in part]
        if isinstance(part, ast.expr):
            return self.written(part)
        if isinstance(part, ast.keyword):
            return ast.keyword(part.arg, self.written(part.value))
        return part

    def _constant(self, node: ast.Constant) -> Written:
        return Known(node.value, literal=True), node

    def _name(self, node: ast.Name) -> Written:
        if node.id == self.self_name:
            assert self.module is not None
            return Modules((self.module,)), node
        if node.id in self.env:
            return self.env[node.id], ast.Name(self.renamed.get(node.id, node.id))
        return self.outer(node.id)

    def outer(self, name: str) -> Written:
        """A name from outside of the function."""
        try:
            found = self.entry.code.named(name)
        except KeyError:
            raise NotImplementedError(f"nothing says what `{name}` is") from None
        found = STANDS_FOR.get(found, found) if isinstance(found, FunctionType) else found
        return Known(found), self.use(name, found)

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
        found = getattr(base.value, node.attr)
        if base.value is F or base.value is torch.nn.functional:
            written = self.use("F", F)
        elif not isinstance(base.value, ModuleType | type | torch.dtype | torch.device) and self.module is not None:
            return self._of_module_value(found), literal(found)
        return Known(found), ast.Attribute(written, node.attr)

    def _of_module(self, module: nn.Module, name: str) -> Value:
        if name == "training":
            return SOME
        if name in module._modules:
            child = module._modules[name]
            return NONE if child is None else Modules((self.whole.alikes[child],))
        if name in module._parameters:
            return NONE if module._parameters[name] is None else SOME
        if name in module._buffers:
            return NONE if module._buffers[name] is None else SOME
        if name not in module.__dict__ and isinstance(getattr(type(module), name, None), FunctionType):
            return Method((module,), name)
        return self._of_module_value(getattr(module, name))

    def _of_module_value(self, value: Any) -> Value:
        if isinstance(value, torch.Tensor):
            return SOME
        # 0 and 1 get no names from the spec: they are switches, like True and False.
        switch = isinstance(value, int) and not isinstance(value, Named) and value in (0, 1)
        return Known(value, literal=value is None or isinstance(value, bool) or switch)

    def _subscript(self, node: ast.Subscript) -> Written:
        base, written = self.eval(node.value)
        index, index_written = self.eval(node.slice)
        made = ast.Subscript(written, index_written)
        if isinstance(base, Record) and isinstance(index, Known) and isinstance(index.value, int):
            return base.items[index.value], made
        if isinstance(base, Items):
            return base.item or SOME, made
        if isinstance(base, Known) and isinstance(base.value, list | tuple) and base.value:
            if isinstance(index, Known):
                return Known(base.value[index.value]), made
            if all(Known(one) == Known(base.value[0]) for one in base.value) and isinstance(base.value[0], int):
                return Known(base.value[0], literal=True), made
        if isinstance(base, Modules):
            return self._items_at(base, node.slice, index), made
        return SOME, made

    def _items_at(self, base: Modules, node: ast.expr, index: Value) -> Value:
        """The items at an index of lists and mappings of modules."""
        if isinstance(node, ast.Slice):
            return Items(self.items_of(base))
        if not isinstance(index, Known):
            return self.items_of(base)
        found = [module[index.value] for module in base.modules]  # type: ignore[index]
        if not all(isinstance(one, nn.Module) for one in found):
            return SOME
        return Modules(tuple(dict.fromkeys(self.whole.alikes[one] for one in found)))

    def items_of(self, container: Modules) -> Value:
        """The children of lists and mappings of modules; the tensors of lists and mappings of parameters."""
        children = [self.whole.alikes[child] for one in container.modules for child in one.children()]
        return Modules(tuple(dict.fromkeys(children))) if children else SOME

    def _slice(self, node: ast.Slice) -> Written:
        return SOME, ast.Slice(*(one and self.written(one) for one in (node.lower, node.upper, node.step)))

    def _starred(self, node: ast.Starred) -> Written:
        value, written = self.eval(node.value)
        return value, ast.Starred(written)

    def _joinedstr(self, node: ast.JoinedStr) -> Written:
        """An f-string; values that are known texts become part of it."""
        made = self._any(node)[1]
        assert isinstance(made, ast.JoinedStr)
        known = [_known_text(part) for part in made.values]
        if None not in known:
            return SOME, ast.Constant("".join(text for text in known if text is not None))
        made.values = [p if text is None else ast.Constant(text) for p, text in zip(made.values, known, strict=True)]
        return SOME, made

    def _tuple(self, node: ast.Tuple) -> Written:
        found = [self.eval(one) for one in node.elts]
        return Record(None, tuple(value for value, _ in found)), ast.Tuple([written for _, written in found])

    def _list(self, node: ast.List) -> Written:
        found = [self.eval(one) for one in node.elts]
        item = join_all(value for value, _ in found) if found else None
        return Items(item), ast.List([written for _, written in found])

    def _listcomp(self, node: ast.ListComp) -> Written:
        saved = dict(self.env)
        generators = [self._generator(one) for one in node.generators]
        value, written = self.eval(node.elt)
        self.env = saved
        return Items(value), ast.ListComp(written, generators)

    def _generatorexp(self, node: ast.GeneratorExp) -> Written:
        value, made = self._listcomp(ast.ListComp(node.elt, node.generators))
        assert isinstance(made, ast.ListComp)
        return value, ast.GeneratorExp(made.elt, made.generators)

    def _generator(self, node: ast.comprehension) -> ast.comprehension:
        value, written = self.eval(node.iter)
        self.bind(node.target, self.item_of(value))
        return ast.comprehension(node.target, written, [self.written(one) for one in node.ifs], node.is_async)

    def item_of(self, value: Value) -> Value:
        """The value that the variable of a loop over `value` takes."""
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
            for index, one in enumerate(target.elts):
                self.bind(one, several[index] if several else SOME)

    def _lambda(self, node: ast.Lambda) -> Written:
        raise NotImplementedError("a `lambda`")


def _known_text(part: ast.expr) -> str | None:
    """The text of a part of an f-string, if it is known and written as it is."""
    if isinstance(part, ast.FormattedValue) and part.conversion == -1 and part.format_spec is None:
        part = part.value
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else None

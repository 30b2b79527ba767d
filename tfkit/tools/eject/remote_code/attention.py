"""Calls of torch's attention, rewritten so that `attn_implementation` of transformers chooses the function."""

from __future__ import annotations

import ast
import copy
import inspect
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import nn

from tfkit.tools.eject.cleanup import returned_expression
from tfkit.tools.eject.config import CONFIG, Named
from tfkit.tools.eject.remote_code.dynamic_cache import Context
from tfkit.tools.eject.specialise import Function
from tfkit.tools.eject.values import SOME_VALUE

TORCH = "scaled_dot_product_attention"
CHOSEN = "chosen_attention"
"""The function in the template that calls the chosen implementation, and returns its output and its weights."""

CONTEXT = "context"
NAMES = {"attn_mask": "mask", "dropout_p": "dropout", "is_causal": "causal", "scale": "scale"}
"""Names of torch's optional arguments, and the corresponding names in `CHOSEN`."""


class ChosenAttention(NamedTuple):
    """The modules whose attention transformers chooses.

    Attributes:
        callers: the modules that call `CHOSEN`.
        cores: the callers that return its output and its weights, which transformers can record.
        in_context: the cores that get the context of their layer, with the keyword arguments for the function.
    """

    callers: frozenset[nn.Module]
    cores: frozenset[nn.Module]
    in_context: frozenset[nn.Module]


def choose_attention(
    functions: Iterable[Function], model: nn.Module, *, causal: bool, in_context: bool
) -> ChosenAttention:
    """Replace calls of torch's attention in the methods of a model by `CHOSEN`.

    Args:
        functions: the functions of the model.
        model: the model.
        causal: if true, calls with a causal flag are causal whenever they have no mask, also with caches.
        in_context: if true, modules with an argument `context` pass it to their cores.
    """
    config = Named()
    config.text = CONFIG
    methods = {function: function.module for function in functions if function.module is not None}
    callers: dict[Function, nn.Module] = {}
    for function, module in methods.items():
        calls = _Calls(causal=causal)
        body = [calls.visit(step) for step in function.body]
        if calls.changed:
            callers[function] = module
            function.set_body(body)
            function.attributes.add(CONFIG)
            module.__dict__[CONFIG] = config
    cores: dict[nn.Module, bool] = {}
    for function, module in callers.items():
        hosts = _hosts(module, model, methods) if _returns_call(function) else []
        if not hosts:
            _take_first(function, _is_chosen)
            continue
        cores[module] = in_context and all(CONTEXT in host.parameters for host in hosts)
        tree = copy.deepcopy(function.code.tree)
        tree.returns = ast.parse("tuple[Tensor, Tensor | None]", mode="eval").body
        function.code = replace(function.code, tree=tree)
        keywords = [ast.keyword(CONTEXT, ast.Name(CONTEXT))] if cores[module] else []
        if keywords:
            _add_context(function)
        for host in hosts:
            _take_first(host, partial(_calls_child, host, module), keywords)
    passing = frozenset(core for core, passes in cores.items() if passes)
    return ChosenAttention(frozenset(callers.values()), frozenset(cores), passing)


def _add_context(core: Function) -> None:
    """Add the argument `context` to a forward, and to its call of `CHOSEN`."""
    tree = copy.deepcopy(core.code.tree)
    tree.args.args.append(ast.arg(CONTEXT, ast.Name(Context.__name__)))
    parameter = inspect.Parameter(CONTEXT, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = ChainMap({Context.__name__: Context}, dict(core.code.names))
    core.code = replace(core.code, tree=tree, parameters={**core.code.parameters, CONTEXT: parameter}, names=names)
    core.arguments[CONTEXT] = SOME_VALUE
    core.needed.add(CONTEXT)
    call = returned_expression(core.body[-1])
    assert isinstance(call, ast.Call)
    call.keywords.append(ast.keyword(CONTEXT, ast.Name(CONTEXT)))


def _returns_call(function: Function) -> bool:
    """Return True if a forward returns the result of `CHOSEN`, and calls it nowhere else."""
    last = function.body[-1]
    calls = [node for step in function.body for node in ast.walk(step) if _is_chosen(node)]
    return function.name == "forward" and isinstance(last, ast.Return) and calls == [last.value]


def _hosts(core: nn.Module, model: nn.Module, methods: Iterable[Function]) -> list[Function]:
    """Return the methods that call a module; empty unless every module with this child calls it by its name."""
    parents = {parent for parent in model.modules() if any(child is core for child in parent._modules.values())}
    hosts = [
        function
        for function in methods
        if any(_called_child(node, function) is core for step in function.body for node in ast.walk(step))
    ]
    return hosts if parents == {function.module for function in hosts} else []


def _called_child(node: ast.AST, function: Function) -> nn.Module | None:
    """Return the child that `self.name(...)` calls in a method; None for any other node."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and function.module is not None):
        return None
    owner = node.func.value
    is_self = isinstance(owner, ast.Name) and owner.id == function.self_name
    return function.module._modules.get(node.func.attr) if is_self else None


def _calls_child(function: Function, child: nn.Module, node: ast.AST) -> bool:
    return _called_child(node, function) is child


def _is_chosen(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == CHOSEN


def _take_first(function: Function, is_call: Callable[[ast.Call], bool], keywords: Sequence[ast.keyword] = ()) -> None:
    """Take the first item of the results of some calls, which get additional keyword arguments."""
    first = _First(is_call, keywords)
    function.body = [first.visit(step) for step in function.body]


class _First(ast.NodeTransformer):
    def __init__(self, is_call: Callable[[ast.Call], bool], keywords: Sequence[ast.keyword]) -> None:
        self.is_call = is_call
        self.keywords = keywords

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not self.is_call(node):
            return node
        return ast.Subscript(ast.Call(node.func, node.args, [*node.keywords, *self.keywords]), ast.Constant(0))


class _Calls(ast.NodeTransformer):
    """Replaces calls of torch's attention by calls of `CHOSEN`, whose first argument is the module."""

    changed = False

    def __init__(self, *, causal: bool) -> None:
        self.causal = causal

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_plain = len(node.args) >= 3 and not any(isinstance(part, ast.Starred) for part in node.args)
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == TORCH and is_plain):
            return node
        self.changed = True
        names = ("attn_mask", "dropout_p", "is_causal")
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        named |= dict(zip(names, node.args[3:], strict=False))
        if self.causal and "is_causal" in named:
            named["is_causal"] = ast.Constant(True)
        keywords = [ast.keyword(NAMES[name], named[name]) for name in (*names, "scale") if name in named]
        return ast.Call(ast.Name(CHOSEN), [ast.Name("self"), *node.args[:3]], keywords)

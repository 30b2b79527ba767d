"""Calls of torch's attention, rewritten so that `attn_implementation` of transformers chooses the function."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from tfkit.tools.eject.config import CONFIG, Named
from tfkit.tools.eject.specialise import Function

TORCH = "scaled_dot_product_attention"
CHOSEN = "chosen_attention"
"""The function in the template that calls the chosen implementation."""

NAMES = {"attn_mask": "mask", "dropout_p": "dropout", "is_causal": "causal", "scale": "scale"}
"""Names of torch's optional arguments, and the corresponding names in `CHOSEN`."""


def choose_attention(functions: Iterable[Function]) -> bool:
    """Replace calls of torch's attention in methods by `CHOSEN`. Return False if there are no such calls."""
    config = Named()
    config.text = CONFIG
    callers = 0
    for function in functions:
        calls = _Calls()
        if function.module is not None:
            function.body = [calls.visit(step) for step in function.body]
        if function.module is not None and calls.changed:
            callers += 1
            function.attributes.add(CONFIG)
            function.module.__dict__[CONFIG] = config
    return callers > 0


class _Calls(ast.NodeTransformer):
    """Replaces calls of torch's attention by calls of `CHOSEN`, whose first argument is the module."""

    changed = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_plain = len(node.args) >= 3 and not any(isinstance(part, ast.Starred) for part in node.args)
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == TORCH and is_plain):
            return node
        self.changed = True
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        optional = ("attn_mask", "dropout_p", "is_causal")[len(node.args) - 3 :]
        keywords = [ast.keyword(NAMES[name], named[name]) for name in (*optional, "scale") if name in named]
        return ast.Call(ast.Name(CHOSEN), [ast.Name("self"), *node.args], keywords)

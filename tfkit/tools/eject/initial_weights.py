"""Writes the method that fills the weights of an ejected model as the spec's `init` does.

The methods of the `init` are specialised like a `forward`, for each rule of `tfkit.building.initialize.rules`. Modules
with equal code share a branch, whose condition is the class of the module, or the end of its name.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from tfkit.building.initialize import Rule
from tfkit.component import InitConfig
from tfkit.nn import Linear, StackedLinear
from tfkit.tools.eject.classes import Classes
from tfkit.tools.eject.cleanup import Replaced, changes_tensors, copied_tree, variable_names
from tfkit.tools.eject.config import CONFIG
from tfkit.tools.eject.source import ejection_error
from tfkit.tools.eject.specialise import Function, Specialiser
from tfkit.tools.eject.text import INDENT, Class, Statement, docs_text, steps_text
from tfkit.tools.eject.torch_modules import torch_class
from tfkit.tools.eject.values import NONE, SOME_VALUE, AbstractValue, ConcreteValue

METHOD = "_init_weights"
_BY_ROW = frozenset({"normal_", "uniform_", "trunc_normal_", "zeros_", "ones_", "constant_", "kaiming_uniform_"})
"""Functions of `nn.init` that fill a row of a matrix independently of the number of rows."""


class InitialWeights:
    """Writes the method that fills the linear layers and the tables of a model.

    Attributes:
        uses: the global names that the method uses, with their objects.
    """

    def __init__(
        self, init: InitConfig, plan: Mapping[str, Rule], modules: Mapping[str, nn.Module], specialiser: Specialiser
    ) -> None:
        self.init = init
        self.modules = modules
        self.whole = specialiser
        self.uses: dict[str, Any] = {"nn": nn}
        # The constructors of torch's classes already fill them as `init: torch` does.
        skipped = (nn.Linear, nn.Embedding) if init.kind_name() == "torch" else ()
        self.plan = {path: rule for path, rule in plan.items() if torch_class(modules[path]) not in skipped}
        self._bodies = {rule: self._body(rule) for rule in dict.fromkeys(self.plan.values())}
        biased = any(getattr(modules[path], "bias", None) is not None for path in self.plan)
        self._bias = self._specialised("bias", bias=SOME_VALUE, fan_in=SOME_VALUE) if biased else []

    def add_to(self, classes: Classes) -> None:
        """Add the method to the class of the model, and a call at the end of `__init__`."""
        if text := self.text(classes):
            self._add(text, classes.of[self.whole.model])

    def text(self, classes: Classes) -> str:
        """Return the code that fills a `module` with a `name`; empty if there is none."""
        groups: dict[str, dict[str, list[str]]] = {}
        for path, rule in self.plan.items():
            module = self.modules[path]
            torch_kind = "nn.Linear" if isinstance(module, nn.Linear) else "nn.Embedding"
            kind = classes.of[module].name if module in classes.of else torch_kind
            groups.setdefault(kind, {}).setdefault(self._filled(module, rule, classes), []).append(path)
        kinds: dict[str, list[str]] = {}
        for kind, bodies in groups.items():
            kinds.setdefault(self._branch(bodies), []).append(kind)
        branches = [
            f"if isinstance(module, {' | '.join(names)}):\n{textwrap.indent(text, INDENT)}"
            for text, names in kinds.items()
        ]
        return "\nel".join(branches)

    def _add(self, text: str, root: Class) -> None:
        """Add the method with this code for each `module` to the class of the model."""
        names = variable_names(ast.parse(text))
        head = "for name, module in self.named_modules():" if "name" in names else "for module in self.modules():"
        config = CONFIG if CONFIG in names else ""
        parameters = ", ".join(["self", *([f"{config}: Config"] if config else [])])
        body = "\n".join([docs_text(type(self.init).__doc__ or ""), head, textwrap.indent(text, INDENT)])
        head = "@torch.no_grad()\n" if changes_tensors(ast.parse(text).body) else ""
        root.methods.append(f"{head}def {METHOD}({parameters}) -> None:\n{textwrap.indent(body.lstrip(), INDENT)}")
        root.statements.append(Statement(f"self.{METHOD}({{}})", {METHOD: config}))
        for values in root.values.values():
            values[METHOD] = config

    def _branch(self, bodies: Mapping[str, list[str]]) -> str:
        """Return the code that fills the modules of a class."""
        modules = [self.modules[path] for paths in bodies.values() for path in paths]
        biased = [getattr(module, "bias", None) is not None for module in modules]
        if not any(biased):
            return self._chosen(bodies)
        text = steps_text(
            _substituted_statements(self._bias, {"bias": "module.bias", "fan_in": "module.weight.size(-1)"})
        )
        text = text if all(biased) else f"if module.bias is not None:\n{textwrap.indent(text, INDENT)}"
        return f"{self._chosen(bodies)}\n{text}"

    def _body(self, rule: Rule) -> list[ast.stmt]:
        """Return the statements that fill the matrix `weight` by a rule."""
        if rule.method != "linear":
            return self._specialised(rule.method, weight=SOME_VALUE)
        values: dict[str, AbstractValue] = {"residual": ConcreteValue(rule.residual, literal=True)}
        values["n_layers"] = NONE if rule.n_layers is None else ConcreteValue(rule.n_layers)
        return self._specialised("linear", weight=SOME_VALUE, **values)

    def _specialised(self, method: str, **values: AbstractValue) -> list[ast.stmt]:
        """Return the statements of a method of the `init`, specialised to these arguments."""
        source = getattr(type(self.init), method)
        if source is InitConfig.tied_table:
            source = type(self.init).table
        function = Function(self.whole, (None, source))
        function.arguments = {**values, "generator": NONE}
        try:
            tree = _WithValues(self.init).visit(copied_tree(function.code.tree))
            function.code = replace(function.code, tree=tree)
            function.run()
        except Exception as cause:
            raise ejection_error(source, str(cause)) from cause
        self.uses |= function.uses
        return function.body

    def _filled(self, module: nn.Module, rule: Rule, classes: Classes) -> str:
        """Return the code that fills the weight of a module."""
        steps = self._bodies[rule]
        parts = module.parts if isinstance(module, Linear | StackedLinear) else None
        by_row = _is_by_row(steps)
        owner, heads = "module.weight", []
        if isinstance(module, StackedLinear) and not (by_row and "weight.size" not in steps_text(steps)):
            heads, owner = [f"for weight in {owner}:"], "weight"
        if parts and not by_row:
            sizes = classes.config.text(list(parts.values()))
            heads, owner = [*heads, f"for weight in {owner}.split({sizes}):"], "weight"
        text = steps_text(
            _substituted_statements(steps, {"n_layers": classes.config.count(rule.n_layers or 0), "weight": owner})
        )
        for head in reversed(heads):
            text = f"{head}\n{textwrap.indent(text, INDENT)}"
        return text

    def _chosen(self, bodies: Mapping[str, list[str]]) -> str:
        """Return the branches, by names, for modules of a class that are filled differently. The default comes last."""
        *special, (default, _) = ordered = sorted(bodies.items(), key=self._frequency)
        if not special:
            return default
        lines: list[str] = []
        for index, (body, paths) in enumerate(special, 1):
            rest = [path for _, later in ordered[index:] for path in later]
            lines += [f"{'elif' if lines else 'if'} {_name_condition(paths, rest)}:", textwrap.indent(body, INDENT)]
        return "\n".join([*lines, "else:", textwrap.indent(default, INDENT)])

    def _frequency(self, body: tuple[str, list[str]]) -> tuple[bool, bool, int]:
        """Return a sort key: the code of default rules, and of many modules, comes last.

        Code that splits a fused weight is no default, because transformers calls it for layers that it adds.
        """
        text, paths = body
        rules = [self.plan[path] for path in paths]
        is_default = not any(rule.residual or rule.method == "tied_table" for rule in rules)
        return ".split(" not in text, is_default, len(rules)


class _WithValues(ast.NodeTransformer):
    """Replaces the fields of an `init` by their values, and removes the generator."""

    def __init__(self, init: InitConfig) -> None:
        self.init = init

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            self.generic_visit(node)
            return node
        value = getattr(self.init, node.attr)
        if not isinstance(value, int | float | str | None):
            raise NotImplementedError(f"`self.{node.attr}` is neither a number nor a string")
        return ast.Constant(value)

    def visit_keyword(self, node: ast.keyword) -> ast.keyword | None:
        self.generic_visit(node)
        return None if node.arg == "generator" else node


def _substituted_statements(steps: list[ast.stmt], names: Mapping[str, str]) -> list[ast.stmt]:
    """Replace names in statements by expressions."""
    values = {name: ast.parse(text, mode="eval").body for name, text in names.items()}
    return [Replaced(values).visit(copied_tree(step)) for step in steps]


def _is_by_row(steps: list[ast.stmt]) -> bool:
    """Return True if the code certainly fills a row of `weight` independently of the number of rows."""
    nodes = [node for step in steps for node in ast.walk(step)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    filled = sum(_fills_rows(call) for call in calls)
    widths = sum(ast.unparse(call) in ("weight.size(1)", "weight.size(-1)") for call in calls)
    return filled + widths == sum(isinstance(node, ast.Name) and node.id == "weight" for node in nodes)


def _fills_rows(call: ast.Call) -> bool:
    """Return True for a call of a function of `nn.init` that fills each row of `weight` in the same way."""
    assert isinstance(call.func, ast.Attribute)
    by_column = any(keyword.arg == "mode" for keyword in call.keywords)
    return call.func.attr in _BY_ROW and bool(call.args) and ast.unparse(call.args[0]) == "weight" and not by_column


def _name_condition(paths: list[str], rest: list[str]) -> str:
    """Return a test of `name` that is true for these paths and false for the rest."""
    if len(paths) == 1:
        return f"name == {paths[0]!r}"
    if (ends := _name_suffixes(paths, rest)) is not None:
        return f"name.endswith({ends})"
    nodes = {path.partition(".")[0] for path in paths}
    if len(nodes) == 1:
        start = f"{nodes.pop()}."
        if (ends := _name_suffixes(paths, [path for path in rest if path.startswith(start)])) is not None:
            return f"name.startswith({start!r}) and name.endswith({ends})"
    return f"name in {tuple(paths)!r}"


def _name_suffixes(paths: list[str], rest: list[str]) -> str | None:
    """Return the shortest suffixes that only these paths have, as code; None if a suffix would contain a number."""
    ends: dict[str, None] = {}
    for path in paths:
        words = path.split(".")
        candidates = ["." + ".".join(words[-n:]) for n in range(1, len(words))]
        end = next((end for end in candidates if not any(other.endswith(end) for other in rest)), None)
        if end is None or any(word.isdigit() for word in end.split(".")):
            return None
        ends[end] = None
    return repr(tuple(ends) if len(ends) > 1 else next(iter(ends)))

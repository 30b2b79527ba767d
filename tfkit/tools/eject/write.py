"""The file: imports, config, functions and classes from the leaves to the root, in the form that ruff gives them."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import textwrap
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tfkit.arguments import checked
from tfkit.builder import assemble
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import AnySpec, Graph, as_graph
from tfkit.tools.common.inputs import random_inputs
from tfkit.tools.eject.check import tried
from tfkit.tools.eject.classes import Classes
from tfkit.tools.eject.ejected_class import CONFIG, Class
from tfkit.tools.eject.functions import INDENT, docs_text, function_text, in_docs, record_text, steps_text
from tfkit.tools.eject.inline import drawn_in
from tfkit.tools.eject.rearranged import lend_sizes
from tfkit.tools.eject.shapes import with_shapes
from tfkit.tools.eject.specialise import Specialiser
from tfkit.tools.eject.symbols import with_names
from tfkit.tools.eject.torch_modules import remembering
from tfkit.torch_private.tensors import storage_key


@checked
def eject(graph: AnySpec) -> str:
    """A model, or that of a spec, as one file of plain PyTorch, which needs nothing but torch.

    Its modules have the names that they have in the built model, so that it loads the same state dict; its forward
    takes the same arguments and computes the same, to the last bit. (While a `CachedModel` decodes, tfkit may multiply
    large float32 weights on the CPU by another kernel than torch's own, which rounds differently.)

    Raises:
        SpecError: a component does something that cannot be written out; or ruff, which formats the file, is missing.
    """
    graph = as_graph(graph)
    named, numbers = with_names(graph)
    sizes = _Sizes()
    with torch.device("meta"), sizes, remembering():
        model = assemble(named)
    lend_sizes(model)
    _check_apart(model)
    whole = Specialiser(model)
    whole.run()
    whole.functions = drawn_in(whole.functions, whole.read)
    file = _File(graph, model, whole, Classes(graph, whole, sizes.found, numbers), numbers)
    with tried():
        return with_shapes(formatted(file.text()), graph)


def _check_apart(model: nn.Module) -> None:
    """Raise SpecError if a tensor has two names: each class makes its own tensors."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (other := names.setdefault(id(parameter), name)) != name:
            message = f"the model cannot be ejected: `{other}` and `{name}` are one tensor under two names"
            raise SpecError(Diagnostic(message, help="have one module, and call it twice"))


_MAKERS = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)


class _Sizes(TorchFunctionMode):
    """Remembers the sizes that tensors were made with, with the names of numbers of the spec."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[Any, ...]] = {}
        self._kept: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MAKERS and args:
            sizes = args[0] if isinstance(args[0], tuple | list) else args
            self.found[storage_key(result)] = tuple(sizes)
            self._kept.append(result)
        return result


def formatted(text: str) -> str:
    """The text as ruff writes it."""
    if importlib.util.find_spec("ruff") is None:
        raise SpecError(Diagnostic("to eject a model, ruff must be installed", help="pip install ruff"))
    for command in (["check", "--select=F401,I,UP,SIM", "--fix", "--quiet"], ["format", "--quiet"]):
        options = ["--isolated", "--target-version=py311", "--line-length=120", "-"]
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *options], input=text, capture_output=True, text=True, check=False
        )
        text = done.stdout or text
    return text


class _File:
    def __init__(
        self, graph: Graph, model: fx.GraphModule, whole: Specialiser, classes: Classes, numbers: dict[str, Any]
    ) -> None:
        self.graph = graph
        self.model = model
        self.whole = whole
        self.classes = classes
        self.numbers = numbers
        self.root = classes.of[whole.alikes[model]]
        self.names = {"torch": torch, "nn": nn, "Tensor": torch.Tensor}
        for entry in whole.functions.values():
            self.names |= entry.uses

    def text(self) -> str:
        """The whole file."""
        whole = self.whole
        parts = [record_text(one, whole.fields(one), whole) for one in whole.records if whole.alone(one) is None]
        parts += [f"{name} = {value!r}" for name, value in self.names.items() if _is_constant(value)]
        parts += [
            function_text(key[0].__name__, entry, whole, method=False)
            for key, entry in whole.functions.items()
            if len(key) == 1 and entry.returns is None
        ]
        parts += [self.klass(one) for one in self.classes.order]
        parts.append(self.main())
        body = "\n\n\n".join(parts)
        config = self.config(body)
        head = [self.docs(), *self.imports(body)]
        return "\n".join(head) + "\n\n\n" + "\n\n\n".join([*([config] if config else []), body]) + "\n"

    def docs(self) -> str:
        spec = self.graph.spec.model
        lines = [f"{spec.name}: {spec.description}" if spec.description else spec.name, ""]
        lines += [f"Source: {spec.source}"] if spec.source else []
        init = spec.init.model_dump()
        if (kind := init.pop("kind")) != "torch":
            fields = ", ".join([kind, *(f"{name} {value}" for name, value in init.items())])
            lines.append(f"Weights start as torch starts them, unless loaded; the spec says: {fields}.")
        lines.append("b batch, t positions, h heads, d width of a head.")
        return f'"""{in_docs(chr(10).join(lines))}\n"""\n'

    def imports(self, body: str) -> list[str]:
        lines = {"import torch", "from torch import Tensor, nn", "from dataclasses import dataclass"}
        if "(NamedTuple)" in body:
            lines.add("from typing import NamedTuple")
        if "nn.Sequential(OrderedDict(" in body:
            lines.add("from collections import OrderedDict")
        ours = {*self.whole.records, *(key[0] for key in self.whole.functions if len(key) == 1)}
        for name, value in self.names.items():
            if value in (torch, nn, torch.Tensor) or _is_constant(value):
                continue
            if value is F:
                lines.add("from torch.nn import functional as F")
            elif isinstance(value, ModuleType):
                lines.add(f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else ""))
            elif isinstance(value, FunctionType | type) and value not in ours:
                lines.add(f"from {value.__module__} import {value.__name__}")
        return sorted(lines)

    def config(self, body: str) -> str:
        body += "".join(
            f"\n{re.sub(r'[a-z_]+', rf'{CONFIG}.' + chr(92) + 'g<0>', how)}" for how in self.classes.derived.values()
        )
        used = {node.attr for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Attribute) and _is_config(node)}
        lines = [
            f"    {name}: {type(value).__name__} = {value!r}" for name, value in self.numbers.items() if name in used
        ]
        head = ["@dataclass(frozen=True)", "class Config:"]
        for name, how in self.classes.derived.items():
            if name in used:
                text = re.sub(r"[a-z_]\w*", r"self.\g<0>", how)
                lines += ["", "    @property", f"    def {name}(self) -> int:", f"        return {text}"]
        return "\n".join([*head, *lines]) if lines else ""

    def klass(self, one: Class) -> str:
        methods = [text for name, text in one.methods.items() if name != "reset_parameters"]
        init = self.init(one)
        if init.count("\n") > 1:
            methods.insert(0, init)
        docs = [docs_text(one.docs), ""] if one.docs else []
        body = "\n".join([*docs, "\n\n".join(methods)])
        return f"class {one.name}({one.base}):\n" + textwrap.indent(body, INDENT)

    def init(self, one: Class) -> str:
        module = one.modules[0]
        arguments = dict.fromkeys(one.arguments.values())
        typed = [self.typed(one, name) for name in arguments]
        head = ", ".join(["self", *([f"{CONFIG}: Config"] if one.takes_config else []), *typed])
        lines = [f"def __init__({head}) -> None:", "    super().__init__()"]
        for statement in self.classes.statements(module):
            lines.append("    " + statement.write(*(one.value(slot, module) for slot in statement.values)))
        for name in self.classes.frozen(module):
            if "." in name:
                lines.append(f"    self.get_parameter({name!r}).requires_grad_(False)")
        reset = self.whole.functions.get((module, "reset_parameters"))
        if reset is not None and reset.body:
            lines += ["    " + line for line in steps_text(reset.body).splitlines()]
        else:
            lines += [f"    {_fill(name, tensor)}" for name, tensor in self.classes.tensors(module).items()]
        return "\n".join(lines)

    def typed(self, one: Class, name: str) -> str:
        slot = next(slot for slot, argument in one.arguments.items() if argument == name)
        text = one.slots[slot][one.modules[0]]
        if text.startswith("nn."):
            return f"{name}: {text.partition('(')[0]}"
        values = [self.classes.value(text) for text in one.slots[slot].values()]
        kinds = {type(value) for value in values}
        value = values[0]
        said = " | ".join(sorted("None" if kind is type(None) else kind.__name__ for kind in kinds))
        return f"{name}: {said}" if not isinstance(value, list | tuple) else f"{name}: list[{type(value[0]).__name__}]"

    def main(self) -> str:
        root = self.root
        inputs = random_inputs(self.graph, batch=1)
        given = []
        for name, value in inputs.items():
            kind = "" if value.is_floating_point() else ", dtype=torch.long"
            given.append(f"{name}=torch.zeros({', '.join(map(str, value.shape))}{kind})")
        lines = ['if __name__ == "__main__":', '    with torch.device("meta"):  # shapes without memory']
        lines.append(f"        model = {root.name}({'Config()' if root.takes_config else ''})")
        lines.append(f"        output = model({', '.join(given)})")
        count = "sum(parameter.numel() for parameter in model.parameters())"
        one = len(self.graph.outputs) == 1
        lines += [] if one else ["    shapes = [one.shape for one in output]"]
        lines.append(f'    print(f"{{{count}:,}} parameters, {{{"output.shape" if one else "shapes"}=}}")')
        return "\n".join(lines)


def _fill(name: str, parameter: torch.Tensor) -> str:
    """The statement that fills a parameter whose class has no method for it."""
    if parameter.dim() < 2:
        return f"nn.init.zeros_(self.{name})"
    return f"nn.init.normal_(self.{name}, std=self.{name}.size(-1) ** -0.5)"


def _is_constant(value: Any) -> bool:
    return isinstance(value, int | float | str | tuple | list)


def _is_config(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == CONFIG

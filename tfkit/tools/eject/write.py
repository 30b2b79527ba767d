"""Writes the file: imports, config, functions, and classes from the leaves to the root, formatted by ruff."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tfkit.arguments import checked
from tfkit.building.builder import assemble_model, graph_of
from tfkit.building.edits import AnyModel, MeasuredModel, check_unedited
from tfkit.building.initialize import init_rules
from tfkit.building.model import unwrapped_model
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph, as_graph
from tfkit.tools.common.model_inputs import random_inputs
from tfkit.tools.eject.classes import Classes
from tfkit.tools.eject.cleanup import variable_names
from tfkit.tools.eject.config import name_of, text_of, with_names
from tfkit.tools.eject.initial_weights import InitialWeights
from tfkit.tools.eject.inline import draw_in, draw_in_expressions
from tfkit.tools.eject.patterns import as_comments, prepare_patterns
from tfkit.tools.eject.proof import convert_errors
from tfkit.tools.eject.shapes import with_shapes
from tfkit.tools.eject.source import written_out
from tfkit.tools.eject.specialise import Specialiser
from tfkit.tools.eject.text import Class, function_text, in_docs, record_text
from tfkit.tools.eject.torch_modules import merge_equal, record_arguments

_IMPORTED = (ModuleType, FunctionType, BuiltinFunctionType, type)
"""Types of global objects that a file imports or defines. Objects of other types are constants."""


@checked
def eject(graph: AnyModel, *, allow_change: bool = False) -> str:
    """Write the model of a spec, or the spec of a built model, as one file of plain PyTorch that needs only torch.

    Its modules have the names that they have in the built model, so that it loads the same state dict; its forward
    takes the same arguments and computes the same, to the last bit. (While a `CachedModel` decodes, tfkit may multiply
    large float32 weights on the CPU by another kernel than torch's own, which rounds differently.)

    Args:
        graph: a spec, or a built model.
        allow_change: write the spec of a built model whose modules were changed. The file computes what the spec
            describes.

    Raises:
        SpecError: a component does something that cannot be written out; or ruff, which formats the file, is missing;
            or the modules of a built model differ from its spec, unless `allow_change`.
    """
    if isinstance(graph, nn.Module):
        check_unedited(model := unwrapped_model(graph), allow_change=allow_change, writer="eject")
        graph = graph_of(model)
    graph = graph.graph if isinstance(graph, MeasuredModel) else as_graph(graph)
    named, config = with_names(graph)
    with torch.device("meta"), record_arguments() as sizes:
        model = assemble_model(named)
    plan = init_rules(model, graph)
    prepare_patterns(model)
    check_no_shared_tensors(model)
    merge_equal(model)
    specialiser = Specialiser(model)
    specialiser.run()
    draw_in_expressions(specialiser.functions, specialiser.read)
    draw_in(specialiser.functions, specialiser.read)
    weights = InitialWeights(
        graph.spec.model.init, plan, {path: model.get_submodule(path) for path in plan}, specialiser
    )
    classes = Classes(graph, specialiser, sizes, config)
    weights.add_to(classes)
    with convert_errors():
        return with_shapes(formatted_code(_file_text(graph, specialiser, classes, weights.uses)), graph)


def check_no_shared_tensors(model: nn.Module) -> None:
    """Raise SpecError if a tensor has two names, because the classes of a file cannot share tensors."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (other := names.setdefault(id(parameter), name)) != name:
            message = f"the model cannot be ejected: `{other}` and `{name}` are one tensor under two names"
            raise SpecError(Diagnostic(message, help="use a single module, and call it twice"))


def formatted_code(text: str) -> str:
    """Format a text with ruff."""
    if importlib.util.find_spec("ruff") is None:
        raise SpecError(Diagnostic("ejecting needs `ruff`, which is not installed", help='pip install "tfkit[eject]"'))
    text = as_comments(text)
    for command in (  # imports have the length that ruff's defaults expect
        ["check", "--select=F401,UP,SIM", "--fix", "--quiet", "--line-length=120"],
        ["check", "--select=I,RUF059,SIM201", "--fix", "--unsafe-fixes", "--quiet"],
        ["format", "--quiet", "--line-length=120"],
    ):
        options = ["--isolated", "--target-version=py311", "-"]
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *options], input=text, capture_output=True, text=True, check=False
        )
        text = done.stdout or text
    return text


def _file_text(graph: Graph, specialiser: Specialiser, classes: Classes, uses: Mapping[str, Any]) -> str:
    """Return the full file. `uses` holds the global names that the initialization uses."""
    config = classes.config
    imports, parts = imports_and_definitions(specialiser, uses)
    parts += [ejected.source(config) for ejected in classes.order]
    parts.append(_main_block(graph, classes.of[specialiser.model]))
    head = f'"""{file_docstring(graph)}\n"""\n\n{imports}'
    return "\n\n\n".join([head, *filter(None, [config.source("\n".join(parts))]), *parts]) + "\n"


def imports_and_definitions(specialiser: Specialiser, uses: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the imports of a model's functions, and its records, constants and functions outside of classes.

    `uses` holds additional global names.
    """
    functions = specialiser.functions.values()
    outside = {name: value for function in functions for name, value in function.uses.items()} | {**uses}
    records = [record for record in specialiser.records if specialiser.records.alone(record) is None]
    parts = _in_order({record.__name__: record_text(record, specialiser.records) for record in records})
    for name, value in outside.items():
        if not isinstance(value, _IMPORTED):
            with written_out(f"the constant `{name}`"):
                parts.append(f"{name} = {text_of(value)}")
    parts += [function_text(called) for called in functions if called.module is None and called.returns is None]
    ours = {*specialiser.records, *(called for _, called in specialiser.functions)}
    return "\n".join(sorted(_import_lines(outside, ours))), parts


def _in_order(records: Mapping[str, str]) -> list[str]:
    """Sort records so that each follows the records in its fields."""
    ordered: dict[str, str] = {}
    while len(ordered) < len(records):
        for name, text in records.items():
            if variable_names(ast.parse(text)) & (records.keys() - {name}) <= ordered.keys():
                ordered.setdefault(name, text)
    return list(ordered.values())


def file_docstring(graph: Graph) -> str:
    """Return the docstring of a file: the model, its source, and the letters of axes."""
    spec = graph.spec.model
    lines = [f"{spec.name}: {spec.description}" if spec.description else spec.name, ""]
    lines += [f"Source: {spec.source}"] if spec.source else []
    lines.append("b batch, t positions, h heads, d width of a head.")
    return in_docs("\n".join(lines))


def _import_lines(outside: Mapping[str, Any], ours: Set[Any]) -> Iterator[str]:
    """Yield the imports of names from outside, and imports that a file may need: ruff removes unused imports."""
    yield "import torch"
    yield "from torch import Tensor, nn"
    yield "from collections import OrderedDict"
    yield "from dataclasses import dataclass"
    yield "from typing import NamedTuple"
    for name, value in outside.items():
        if value is F:
            yield "from torch.nn import functional as F"
        elif isinstance(value, ModuleType) and value not in (torch, nn):
            yield f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
        elif isinstance(value, FunctionType | BuiltinFunctionType | type) and value not in {torch.Tensor, *ours}:
            if (home := value.__module__) == "builtins":
                continue
            if isinstance(value, BuiltinFunctionType) and (public := name_of(value)) is not None:
                home = public.removesuffix(f".{value.__name__}").replace("nn", "torch.nn")
            yield f"from {home} import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")


def _main_block(graph: Graph, root: Class) -> str:
    arguments = []
    for name, value in random_inputs(graph, batch=1).items():
        kind = "" if value.is_floating_point() else ", dtype=torch.long"
        arguments.append(f"{name}=torch.zeros({', '.join(map(str, value.shape))}{kind})")
    lines = ['if __name__ == "__main__":', '    with torch.device("meta"):  # shapes without memory']
    lines.append(f"        model = {root.name}({'Config()' if root.takes_config else ''})")
    lines.append(f"        output = model({', '.join(arguments)})")
    count = "sum(parameter.numel() for parameter in model.parameters())"
    single = len(graph.outputs) == 1
    lines += [] if single else ["    shapes = [one.shape for one in output]"]
    lines.append(f'    print(f"{{{count}:,}} parameters, {{{"output.shape" if single else "shapes"}=}}")')
    return "\n".join(lines)

"""The two files of code: the modeling file with the ejected modules of a model, and the configuration file."""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import torch
from torch import nn

from tfkit.building.builder import assemble
from tfkit.building.initialize import rules
from tfkit.checkpoint.remote_code import BODY
from tfkit.component import Cached, State
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import max_len
from tfkit.nn import Past
from tfkit.tools.eject.classes import Classes
from tfkit.tools.eject.config import Config, with_names
from tfkit.tools.eject.initial_weights import InitialWeights
from tfkit.tools.eject.inline import draw_in
from tfkit.tools.eject.source import lend_sizes
from tfkit.tools.eject.specialise import Function, Specialiser
from tfkit.tools.eject.text import docs_text, in_docs, steps_text
from tfkit.tools.eject.torch_modules import merge_equal, remembering
from tfkit.tools.eject.values import ANY, SOME, Items, Maybe, Value, may_be_none
from tfkit.tools.eject.write import check_apart, definitions, docs, formatted
from tfkit.tools.save.remote_code.separate import Parts, parts_of, separated

TEMPLATE = Path(__file__).with_name("modeling.py.txt")
CONFIGURATION = Path(__file__).with_name("configuration.py.txt")
KEY = re.compile(r"#\[(?P<end>/)?(?P<negated>not )?(?P<flag>\w+)\]")
"""A line of the template that begins, or ends, lines for models with a property, or without it."""
RESERVED = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "max_length", "min_length", "num_beams", "length_penalty", "dtype"}
)
"""Names that transformers uses, for settings of generation or elsewhere."""
ATTRIBUTES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "d_head",
    "intermediate_size": "d_ff",
    "max_position_embeddings": "max_len",
}
"""The fields of the config by the names that transformers uses."""


def model_type(file: str) -> str:
    """Return the type of a model in config.json, which no class of transformers has, so that none opens the folder."""
    return f"{file}_tfkit"


class WrittenCode(NamedTuple):
    """The code of a folder.

    Attributes:
        name: the beginning of the names of its classes.
        file: the end of the names of its two files.
        modeling: the text of the file with the model.
        configuration: the text of the file with its config.
        fields: the values of the config.
    """

    name: str
    file: str
    modeling: str
    configuration: str
    fields: Mapping[str, Any]


def code_of(graph: Graph) -> WrittenCode:
    """Write a model as the code of a folder. Raise SpecError if it has no form there, or does what has no text."""
    parts_of(graph)
    named, config = with_names(graph, RESERVED)
    with torch.device("meta"), remembering() as sizes:
        named = _with_gaps(named)
        model = assemble(named)
        parts = parts_of(named)
        name = type(model).__name__
        filling = rules(model, graph).items()
        plan = {parts.name_in_folder(path).removeprefix(f"{BODY}."): rule for path, rule in filling}
        head = separated(model, parts, name)
    body = head.get_submodule(BODY)
    lend_sizes(head)
    check_apart(head)
    merge_equal(head)
    whole = Specialiser(head)
    memory: dict[str, Value] = {}
    if parts.decodes:
        memory = {"past": Maybe(whole.records.add(Past, [SOME, SOME, ANY])), "caches": Maybe(Items(Items(Items(SOME))))}
    whole.run({head: {}, body: memory})
    draw_in(whole.functions, whole.read)
    for function in whole.functions.values():
        _narrow_result(function)
    weights = InitialWeights(graph.spec.model.init, plan, _modules(head, plan), whole)
    classes = Classes(graph, whole, sizes, config, f"{BODY}.")
    return _ModelingWriter(graph, parts, name, whole, classes, config, weights).code()


def _with_gaps(graph: Graph) -> Graph:
    """Return a graph in which padding may lie between tokens, as users of transformers expect."""
    nodes = []
    for node in graph.nodes:
        signals = {
            name: signal if isinstance(signal, list) else replace(signal, gaps=True)
            for name, signal in node.signals.items()
        }
        nodes.append(replace(node, signals=signals))
    return replace(graph, nodes=tuple(nodes))


def _narrow_result(function: Function) -> None:
    """Remove None from the type of a result that is never None, so that a type checker accepts its use."""
    returns = function.code.tree.returns
    is_open = isinstance(returns, ast.BinOp) and ast.unparse(returns.right) == "None"
    if isinstance(returns, ast.BinOp) and is_open and not may_be_none(function.result):
        tree = copy.deepcopy(function.code.tree)
        tree.returns = returns.left
        function.code = replace(function.code, tree=tree)


def _modules(head: nn.Module, names: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return modules of the body by their names in it, and modules of the head by their names there."""
    body = head.get_submodule(BODY)
    inside = dict(body.named_modules(remove_duplicate=False))
    return {name: inside[name] if name in inside else head.get_submodule(name) for name in names}


class _ModelingWriter:
    """Writer of the two files, from their templates."""

    def __init__(
        self,
        graph: Graph,
        parts: Parts,
        name: str,
        whole: Specialiser,
        classes: Classes,
        config: Config,
        weights: InitialWeights,
    ) -> None:
        self.graph = graph
        self.parts = parts
        self.name = name
        self.file = re.sub(r"\W", "_", graph.name).lower()
        self.whole = whole
        self.classes = classes
        self.config = config
        self.weights = weights

    def code(self) -> WrittenCode:
        """Return both files."""
        modeling = self._modeling()
        fields, properties = self.config.fields(modeling)
        fields = {name: value for name, value in self._fields().items() if name not in fields} | fields
        attributes = {theirs: ours for theirs, ours in ATTRIBUTES.items() if ours in fields}
        lines = [f"    {name}: {_type(value)} = {value!r}" for name, value in fields.items()]
        words = {
            "description": in_docs(self.graph.name),
            "name": self.name,
            "model_type": model_type(self.file),
            "attribute_map": repr(attributes),
            "fields": "\n".join([*lines, *properties]),
        }
        configuration = formatted(_filled(CONFIGURATION, words, {}))
        return WrittenCode(self.name, self.file, modeling, configuration, fields)

    def _fields(self) -> dict[str, Any]:
        """Return the fields of the config that tools read, although the model may not."""
        layers, length = self.parts.stack.stack, max_len(self.graph)
        fields: dict[str, Any] = {
            "d_model": self.parts.stack.output.width,
            "vocab_size": self.parts.head.output.width,
        }
        fields |= {} if layers is None else {"n_layers": layers.depth}
        fields |= {} if length is None else {"max_len": length}
        fields |= {name: self.config.numbers[name] for name in ATTRIBUTES.values() if name in self.config.numbers}
        return {**fields, "tie_word_embeddings": self.parts.is_tied, "use_cache": self.parts.decodes}

    def _modeling(self) -> str:
        head = self.whole.model
        body = head.get_submodule(BODY)
        roots = [self.classes.of[head], self.classes.of[body]]
        head_lines = sorted(roots[0].lines(), key=lambda line: not line.startswith(f"self.{BODY} "))
        layers = self._layer_classes()
        for ejected in self.classes.order:
            if ejected.name in layers:
                ejected.base = "GradientCheckpointingLayer"
            if ejected.filling and ejected not in roots:
                ejected.methods.append(_method("reset_parameters", ejected.filling))
                ejected.filling = ["self.reset_parameters()"]
        imports, parts = definitions(self.whole, self.weights.uses)
        parts += [ejected.source(self.config) for ejected in self.classes.order if ejected not in roots]
        windows = any(isinstance(entry, Cached) and entry.window for layer in self.parts.cached for entry in layer)
        states = any(isinstance(entry, State) for layer in self.parts.cached for entry in layer)
        words = {
            "docs": docs(self.graph) + "\n",
            "imports": imports + "\nfrom torch.nn import functional as F",
            "file": self.file,
            "name": self.name,
            "description": in_docs(self.graph.name),
            "definitions": "\n\n\n".join(parts),
            "sizes": f"self.sizes = {self._sizes(windows=windows)}" if self.parts.decodes else "",
            "head_class": self.parts.head_class,
            "output": "CausalLMOutputWithPast" if self.parts.decodes else "MaskedLMOutput",
            "body_output": "BaseModelOutputWithPast" if self.parts.decodes else "BaseModelOutput",
            "ragged": "(mask is not None or self.keeps_all)" if windows else "mask is not None",
            "is_croppable": "False" if states else "self.keeps_all",
            "no_split": repr(layers),
            "layers": layers[0] if len(layers) == 1 else f"[{', '.join(layers)}]",
            "init_weights": textwrap.indent(self._init_weights(), "    ").lstrip(),
            "embedding": self.parts.embedding.name,
            "body_init": _indented(roots[1].lines()),
            "head_init": _indented(head_lines),
            "body": _indented(self._steps(body, "x")),
            "head": _indented(self._steps(head, "logits")),
        }
        flags = {"windows": windows, "states": states, "tied": self.parts.is_tied}
        flags |= {"bounded": windows or states, "decodes": self.parts.decodes, "types": self.parts.types is not None}
        text = _filled(TEMPLATE, words, flags).replace("config: Config", f"config: {self.name}Config")
        return formatted(text)

    def _layer_classes(self) -> list[str]:
        """Return the names of the classes of the layers."""
        layers = self.whole.model.get_submodule(f"{BODY}.{self.parts.stack.name}.layers")
        return list(dict.fromkeys(self.classes.of[layer].name for layer in layers.children()))

    def _sizes(self, *, windows: bool) -> str:
        """Return the sizes of the tensors that the layers keep, as an expression."""
        layers = [f"[{', '.join(self._size(entry, windows) for entry in layer)}]" for layer in self.parts.cached]
        runs = [(text, len(list(equal))) for text, equal in groupby(layers)]
        if len(runs) == 1:
            return f"{runs[0][0]} * {self.config.count(len(layers))}".replace("[", "[[", 1).replace("] *", "]] *", 1)
        return f"[{', '.join(text if n == 1 else f'*[{text}] * {n}' for text, n in runs)}]"

    def _size(self, entry: Cached | State, windows: bool) -> str:
        if isinstance(entry, State):
            sizes = [self.config.text(size) for size in (entry.heads, entry.rows, entry.width)]
            return f"State({', '.join(sizes + ['wide=True'] * entry.wide)})"
        numbers = [entry.heads, entry.width, *([entry.window] if windows else [])]
        return f"({', '.join(map(self.config.text, numbers))})"

    def _init_weights(self) -> str:
        """Return the method that fills a module whose weights are missing in a file."""
        text = self.weights.text(self.classes)
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        lines = [docs_text(type(self.graph.spec.model.init).__doc__ or "")]
        lines += ["config = self.config"] if "config" in names else []
        if "name" in names:
            lines.append('name = next((name for name, child in self.named_modules() if child is module), "")')
        reset = 'callable(reset := getattr(module, "reset_parameters", None)):\n    reset()'
        lines += [f"{text}\nelif {reset}" if text else f"if {reset}"]
        return f"@torch.no_grad()\n{_method('_init_weights', lines, 'self, module: nn.Module')}"

    def _steps(self, module: nn.Module, result: str) -> list[str]:
        """Return the statements of a forward, with its result as the value of a name."""
        (function,) = [f for (owner, name), f in self.whole.functions.items() if owner is module and name == "forward"]
        *steps, last = function.body
        assert isinstance(last, ast.Return)
        assert last.value is not None
        steps.append(ast.Assign([ast.Name(result)], last.value, lineno=0))
        return steps_text(steps).splitlines()


def _method(name: str, lines: Sequence[str], parameters: str = "self") -> str:
    return f"def {name}({parameters}) -> None:\n{textwrap.indent(chr(10).join(lines), '    ')}"


def _indented(lines: Sequence[str]) -> str:
    """Return statements for a place in a method of the template."""
    return textwrap.indent("\n".join(lines), " " * 8).lstrip()


def _type(value: Any) -> str:
    return type(value).__name__.removeprefix("Named").lower()


def _filled(template: Path, words: Mapping[str, str], flags: Mapping[str, bool]) -> str:
    """Return the text of a template, with its words replaced and without the lines for other models."""
    lines: list[str] = []
    omitted: list[str] = []
    for line in template.read_text(encoding="utf-8").splitlines():
        key = KEY.fullmatch(line)
        if key is None:
            lines += [] if omitted else [line]
        elif key["end"]:
            omitted = [flag for flag in omitted if flag != line.replace("/", "")]
        elif flags[key["flag"]] == bool(key["negated"]):
            omitted.append(line)
    return Template("\n".join(lines) + "\n").substitute(words)

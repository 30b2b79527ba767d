"""TorchScript by scripting: control flow is preserved, batch and length are dynamic, and C++ loads the file.

A file has the methods `forward` and, for decoding, `start` and `step`:

    state = start(batch, length, source, source_mask)   # inputs that are read once, if any, and their masks
    logits = step(state, tokens, tokens_mask, keep)     # the next tokens; `state` is updated

All methods call the children of the model, so each weight is stored once, under its name. The methods also call `read`
and `piece`, the modules of `tfkit.CachedModel`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.building.builder import graph_of, inputs_of
from tfkit.component import Cached, State
from tfkit.decoding.modules import initial_value_names, reading_module, stepping_module
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.graph.decode_split import DecodeSplit, memory_field, split_if_decodable
from tfkit.nn.code_files import run_text
from tfkit.nn.program import written_forward
from tfkit.plugin.registry import written_in
from tfkit.tools.common.model_inputs import as_tensors
from tfkit.tools.export import script_state
from tfkit.tools.export.formats import CachedReader, ComponentCall, Format, Inputs, Opened, model_metadata
from tfkit.torch_private.torchscript import forget_classes, no_deprecation_warnings

HELP = "export to a format without TorchScript: --format pt2, aoti, onnx or safetensors"

REASON = 240
"""Columns of TorchScript's reason: a list of the variants of a function may have many lines."""


class TorchScript(Format):
    """One file with the methods of `tfkit.tools.export.torchscript_format`; its metadata are extra files."""

    name = "torchscript"
    suffixes = (".ts", ".pt")
    description = "loaded by C++ without Python, see tools/cpp; with cached decoding"

    def refusals(self, model: fx.GraphModule) -> Sequence[Diagnostic]:
        try:
            scripted_model(model)
        except SpecError as error:
            return error.diagnostics
        return []

    def write(self, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        module = scripted_model(model)
        with no_deprecation_warnings():
            torch.jit.save(module, str(path), _extra_files=model_metadata(model))

    def open(self, path: Path, model: fx.GraphModule) -> Opened:
        with no_deprecation_warnings():
            return _ScriptedFile(torch.jit.load(str(path)), model)


class _ScriptedFile(Opened):
    def __init__(self, module: Any, model: fx.GraphModule) -> None:
        self._module, self._model = module, model

    def forward(self, inputs: Inputs) -> list[Tensor]:
        taken = inputs_of(self._model)
        return as_tensors(self._module(**{name: value for name, value in inputs.items() if name in taken}))

    def cached(self, length: int) -> CachedReader | None:
        parts = split_if_decodable(graph_of(self._model))
        return None if parts is None else _ScriptReader(self._module, length, parts.step_inputs[0])

    def weights(self) -> Mapping[str, Tensor]:
        tensors: Mapping[str, Tensor] = self._module.state_dict()
        return tensors

    def outputs(self, inputs: Inputs, calls: Mapping[str, ComponentCall]) -> Mapping[str, Tensor]:
        modules = dict(self._module.named_modules())
        results = {}
        for path in calls.keys() & modules.keys():
            try:
                result = modules[path](*calls[path].args, **calls[path].kwargs)
            except RuntimeError:  # from Python, TorchScript accepts fewer argument types than from TorchScript
                continue
            if isinstance(result, Tensor):
                results[path] = result
        return results


class _ScriptReader:
    def __init__(self, module: Any, length: int, main: str) -> None:
        self._module, self._length, self._main = module, length, main
        self._state: Any = None

    def start(self, batch: int, /, **inputs: Tensor) -> None:
        self._state = self._module.start(batch, self._length, **inputs)

    def __call__(self, tokens: Tensor, mask: Tensor | None = None, /, **inputs: Tensor) -> Any:
        if self._state is None:
            self.start(tokens.size(0))
        arguments = inputs if mask is None else {f"{self._main}_mask": mask, **inputs}
        return self._module.step(self._state, tokens, **arguments)


def scripted_model(model: fx.GraphModule) -> Any:
    """Script a model; raise SpecError that names the innermost component at fault."""
    try:
        return script_module(with_methods(model))
    except Exception as error:
        raise SpecError(scripting_error(model, *at_fault(model, error))) from error


def script_module(module: nn.Module) -> Any:
    """Script a module. A failed class is discarded, because the next attempt must not reuse it."""
    with no_deprecation_warnings():
        try:
            return torch.jit.script(module)
        except Exception:
            forget_classes()
            raise


def at_fault(model: fx.GraphModule, error: Exception) -> tuple[str, Exception]:
    """Return the path and the error of the innermost component that cannot be scripted alone.

    If each component can, return an empty path and `error`.
    """
    for path in sorted(model.meta["components"], key=lambda path: -path.count(".")):
        try:
            script_module(model.get_submodule(path))
        except Exception as cause:
            return path, cause
    return "", error


def scripting_error(model: fx.GraphModule, path: str, cause: Exception) -> Diagnostic:
    """Return the error of a component, or of the model if `path` is empty, that cannot be scripted."""
    if not path:
        message = f"{quoted(graph_of(model).name)} cannot be scripted by TorchScript"
        return Diagnostic(message, notes=(reason_of(cause),), help=HELP)
    config = model.meta["components"][path]
    message = f"{config.slot} kind {quoted(config.kind_name())} cannot be scripted by TorchScript"
    where = f"the component is written in {written_in(type(config))}"
    return Diagnostic(message, None, f"graph.{path}", (reason_of(cause), where), HELP)


def reason_of(error: Exception) -> str:
    """Return the lines of TorchScript's error before the first location, shortened, and the location."""
    text = str(error)
    location = re.search(r'^ *File "(.*)", line (\d+)$', text, re.MULTILINE)
    lines = [line.strip() for line in text[: location.start() if location else None].splitlines()]
    lines = [line for line in lines if line not in ("", ":", "The original call is:")] or [type(error).__name__]
    if location is None:
        return lines[0]
    # The first line may be only the signature of a function: the cause follows.
    reason = textwrap.shorten(" ".join(lines).removesuffix(":"), REASON, placeholder=" ...")
    return f"{reason} ({location[1]}:{location[2]})"


STATE = "dict[str, list[list[Tensor]]]"
OPTIONAL = "Tensor | None = None"
Layer = tuple[Cached | State, ...]


def with_methods(model: fx.GraphModule) -> nn.Module:
    """Return the module to script, without `start` and `step` if the model needs full sequences."""
    name, parts = type(model).__name__, split_if_decodable(graph_of(model))
    methods: dict[str, Any] = {"forward": _forward_of(model, "forward")}
    if parts is not None:
        methods |= _decoding_methods(model, parts)
    module: nn.Module = type(name, (nn.Module,), {**methods, "__module__": __name__})()
    for path, child in model.named_children():
        module.add_module(path, child)
    return module.train(model.training)


def argument_annotations(model: fx.GraphModule, names: Sequence[str]) -> dict[str, str]:
    """Return annotations for these inputs and their masks, optional ones last."""
    inputs, taken = graph_of(model).inputs, inputs_of(model)
    masks = [f"{name}_mask" for name in names if f"{name}_mask" in taken]
    needed = {name: "Tensor" for name in names if not inputs[name].optional}
    return needed | dict.fromkeys([*masks, *(name for name in names if inputs[name].optional)], OPTIONAL)


def _decoding_methods(model: fx.GraphModule, parts: DecodeSplit) -> dict[str, Any]:
    """Return the methods for decoding, compiled from text."""
    graph = graph_of(model)
    stepping = stepping_module(model, graph, parts)
    methods = {"piece": _forward_of(stepping, "piece")}
    values = {name: name for name in argument_annotations(model, parts.initial_inputs)}
    lines = []
    if parts.initial_nodes:
        reading = reading_module(model, graph, parts)
        methods["read"] = _forward_of(reading, "read")
        lines.append(f"made = self.read({_arguments_text(inputs_of(reading), {})})")
        values |= {name: f"made[{index}]" for index, name in enumerate(initial_value_names(parts))}
    passed = {name: values[name] for name in inputs_of(stepping) if name in values}
    lines += [f"keep_value(state, {name!r}, {value})" for name, value in passed.items()]
    methods["start"] = _start_method(model, parts, [*lines, *_cache_lines(parts, values)])
    methods["step"] = _step_method(model, parts, inputs_of(stepping), passed)
    return methods


def _start_method(model: fx.GraphModule, parts: DecodeSplit, lines: Sequence[str]) -> Any:
    like = _attribute_expression(next(name for name, _ in model.named_parameters()))
    body = [f"like = {like}", "state = empty_state(batch, length, like)", *lines, "return state"]
    parameters = {"batch": "int", "length": "int"} | argument_annotations(model, parts.initial_inputs)
    return _compiled_method(f"{type(model).__name__} start", parameters, STATE, body)


def _step_method(model: fx.GraphModule, parts: DecodeSplit, taken: Sequence[str], passed: Collection[str]) -> Any:
    """Write the method that runs a step; `passed` comes from the state, masks and lengths in every step."""
    parameters, main = argument_annotations(model, parts.step_inputs), parts.step_inputs[0]
    parameters.setdefault(f"{main}_mask", OPTIONAL)
    words = {"past": f"past_of(state, {main}, {main}_mask)", "cache": "state"}
    for name in passed:
        always = name.endswith("_mask") or name in parts.repeated_sources
        words[name] = f"{'kept' if always else 'first'}_value(state, {name!r})"
    body = [
        f"result = self.piece({_arguments_text(taken, words)})",
        f"move_on(state, {main}, {main}_mask)",
        "return result",
    ]
    return _compiled_method(
        f"{type(model).__name__} step", {"state": STATE} | parameters | {"keep": "int = 0"}, "", body
    )


def _forward_of(module: fx.GraphModule, name: str) -> Any:
    """Return the forward of a module as a method with a different name."""
    forward, _ = written_forward(module.graph, f"{type(module).__name__} {name}")
    forward.__name__ = name  # the name under which TorchScript calls it
    return forward


def _cache_lines(parts: DecodeSplit, values: Mapping[str, str]) -> Iterator[str]:
    """Return the lines of code that create the caches. Equal consecutive caches are created in one call."""
    for name, (node, state) in parts.step_nodes.items():
        for layer, count in _layer_counts(state.caches):
            yield f"add_caches(state, {name!r}, {count}, {_sizes_text(layer, 'length', 1)}, like)"
        for layer, count in _layer_counts(state.memory_caches):
            length = f"{values[str(node.wires[memory_field(node)])]}.size(1)"
            yield f"add_caches(state, '{name}.memory', {count}, {_sizes_text(layer, length, 0)}, like)"


def _layer_counts(layers: Sequence[Layer]) -> list[tuple[Layer, int]]:
    return [(layer, len(list(run))) for layer, run in groupby(layers)]


def _sizes_text(layer: Layer, length: str, n_more: int) -> str:
    """Format the sizes of a layer's caches as an argument: heads, slots or rows, width, and whether it is widened."""
    sizes = []
    for entry in layer:
        if isinstance(entry, State):
            sizes.append(f"({entry.heads}, {entry.rows}, {entry.width}, {entry.wide})")
        else:
            slots = length if entry.window is None else f"min({length}, {entry.window})"
            sizes.append(f"({entry.heads}, {slots} + {n_more}, {entry.width}, False)")
    return f"[{', '.join(sizes)}]" if sizes else "torch.jit.annotate(list[tuple[int, int, int, bool]], [])"


def _arguments_text(names: Sequence[str], words: Mapping[str, str]) -> str:
    """Format the arguments of a call by name; `words` replaces the names themselves."""
    return ", ".join(f"{name}={words.get(name, name)}" for name in names)


def _attribute_expression(path: str) -> str:
    """Return `self.a.layers` as an expression in which TorchScript can read a number."""
    expression = "self"
    for part in path.split("."):
        expression = f'getattr({expression}, "{part}")' if part.isdigit() else f"{expression}.{part}"
    return expression


def _compiled_method(name: str, parameters: Mapping[str, str], returns: str, body: Sequence[str]) -> Any:
    """Compile a method from its source, and register the source for TorchScript."""
    signature = ", ".join(["self", *(f"{parameter}: {annotation}" for parameter, annotation in parameters.items())])
    arrow = f" -> {returns}" if returns else ""
    *lines, last = body
    text = [f"def method({signature}){arrow}:", "    with torch.no_grad():", *(f"        {line}" for line in lines)]
    code = "\n".join([*text, f"    {last}", ""])
    return torch.jit.export(run_text(code, name, {**vars(script_state)})["method"])

"""TorchScript by scripting: control flow stays, batch and length are free, and C++ loads it without Python."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.builder import graph_of, inputs_of
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.graph.decode_split import split_if_decodable
from tfkit.plugin.registry import written_in
from tfkit.tools.common.comparison_inputs import as_tensors
from tfkit.tools.export.format import Call, Format, Inputs, Opened, Reader, metadata
from tfkit.tools.export.methods import with_methods
from tfkit.torch_private.torchscript import forget, quiet

HELP = "another --format may take it"


class TorchScript(Format):
    """One file with the methods of `tfkit.tools.export.methods`; its metadata are extra files."""

    name = "torchscript"
    suffixes = (".ts", ".pt")
    description = "loaded by C++ without Python, see tools/cpp; with cached decoding"

    def refusals(self, model: fx.GraphModule) -> Sequence[Diagnostic]:
        try:
            scripted(model)
        except SpecError as error:
            return error.diagnostics
        return []

    def write(self, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        module = scripted(model)
        with quiet():
            torch.jit.save(module, str(path), _extra_files=metadata(model))

    def open(self, path: Path, model: fx.GraphModule) -> Opened:
        with quiet():
            return _Loaded(torch.jit.load(str(path)), model)


class _Loaded(Opened):
    def __init__(self, module: Any, model: fx.GraphModule) -> None:
        self._module, self._model = module, model

    def forward(self, inputs: Inputs) -> list[Tensor]:
        taken = inputs_of(self._model)
        return as_tensors(self._module(**{name: value for name, value in inputs.items() if name in taken}))

    def cached(self, length: int) -> Reader | None:
        parts = split_if_decodable(graph_of(self._model))
        return None if parts is None else _Reader(self._module, length, parts.given_again[0])

    def weights(self) -> Mapping[str, Tensor]:
        tensors: Mapping[str, Tensor] = self._module.state_dict()
        return tensors

    def outputs(self, inputs: Inputs, calls: Mapping[str, Call]) -> Mapping[str, Tensor]:
        modules = dict(self._module.named_modules())
        results = {}
        for path in calls.keys() & modules.keys():
            try:
                result = modules[path](*calls[path].args, **calls[path].kwargs)
            except RuntimeError:  # TorchScript takes fewer argument types from Python than from itself
                continue
            if isinstance(result, Tensor):
                results[path] = result
        return results


class _Reader:
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


def scripted(model: fx.GraphModule) -> Any:
    """Script a model; raise SpecError that names the innermost component at fault."""
    try:
        return script(with_methods(model))
    except Exception as error:
        raise SpecError(refusal(model, error)) from error


def script(module: nn.Module) -> Any:
    """Script a module. A failed class is discarded, because the next attempt must not reuse it."""
    with quiet():
        try:
            return torch.jit.script(module)
        except Exception:
            forget()
            raise


def refusal(model: fx.GraphModule, error: Exception) -> Diagnostic:
    """Return the error with the innermost component that cannot be scripted alone."""
    components = model.meta["components"]
    for path in sorted(components, key=lambda path: -path.count(".")):
        try:
            script(model.get_submodule(path))
        except Exception as cause:
            config = components[path]
            message = f"{config.slot} kind {quoted(config.kind_name())} cannot be scripted by TorchScript"
            where = f"the component is written in {written_in(type(config))}"
            return Diagnostic(message, None, f"graph.{path}", (_reason(cause), where), HELP)
    message = f"{quoted(graph_of(model).name)} cannot be scripted by TorchScript"
    return Diagnostic(message, notes=(_reason(error),), help=HELP)


def _reason(error: Exception) -> str:
    """Return the first line of TorchScript's error, and the first location in it."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    place = re.search(r'^ *File "(.*)", line (\d+)$', str(error), re.MULTILINE)
    return f"{first} ({place[1]}:{place[2]})" if place else first

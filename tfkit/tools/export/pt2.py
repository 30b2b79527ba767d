"""`torch.export` and AOTInductor: programs of tensor operations that torch loads without the original Python code.

An archive contains several programs (see `exported_programs.py`), or libraries that are compiled for a single type of
processor, and stores their weights once. `torch.export.load` returns the model; `load_pt2` of
`torch.export.pt2_archive._package` returns all programs by name.
https://docs.pytorch.org/docs/stable/export.html, https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.building.builder import graph_of, inputs_of
from tfkit.errors import Diagnostic
from tfkit.graph.input_shapes import fixed_lengths
from tfkit.tools.common.model_inputs import as_tensors, export_inputs
from tfkit.tools.export.exported_programs import (
    MODEL,
    Programs,
    Watched,
    export_errors,
    export_module,
    model_programs,
    program_arguments,
)
from tfkit.tools.export.failing_component import suppress_messages
from tfkit.tools.export.formats import ComponentCall, Format, Inputs, Opened, model_metadata
from tfkit.torch_private.programs import (
    arguments_of,
    has_compiler,
    read_libraries,
    read_programs,
    write_libraries,
    write_programs,
)


class Pt2(Format):
    """Programs of `torch.export` with dynamic shapes: the full sequence, and the steps of cached decoding."""

    name = "pt2"
    suffixes = (".pt2",)
    description = "torch.export: programs of tensor operations, loaded by torch"

    def refusals(self, model: fx.GraphModule) -> list[Diagnostic]:
        return export_errors(model)

    def write(self, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        write_programs(path, model_programs(model, inputs), model_metadata(model))

    def open(self, path: Path, model: fx.GraphModule) -> Opened:
        return _Loaded(path, model)


class _Loaded(Programs):
    """The programs of an archive."""

    def __init__(self, path: Path, model: fx.GraphModule) -> None:
        super().__init__(graph_of(model))
        with suppress_messages():
            self._programs = read_programs(path)
        self._modules: dict[str, fx.GraphModule] = {}
        for program in self._programs.values():  # each program was read with a copy of the weights
            program.state_dict.update({key: self.weights()[key] for key in program.state_dict})

    def takes(self, name: str) -> list[str]:
        return arguments_of(self._programs[name])

    def run(self, name: str, arguments: dict[str, Any]) -> list[Tensor]:
        if name not in self._modules:
            self._modules[name] = self._programs[name].module()
        with torch.no_grad():
            return as_tensors(self._modules[name](**arguments))

    def weights(self) -> Mapping[str, Tensor]:
        return self._programs[MODEL].state_dict

    def outputs(self, inputs: Inputs, calls: Mapping[str, ComponentCall]) -> Mapping[str, Tensor]:
        arguments = program_arguments(self.graph, inputs, self.takes(MODEL))
        watched = Watched(self._programs[MODEL])
        with torch.no_grad():
            watched.run(*arguments.values())
        return watched.outputs


class Aoti(Format):
    """The programs of `torch.export`, compiled ahead of time."""

    name = "aoti"
    description = "pt2 compiled for this machine by AOTInductor"

    def refusals(self, model: fx.GraphModule) -> list[Diagnostic]:
        if not has_compiler():
            message = "AOTInductor needs a C++ compiler, but there is none"
            return [Diagnostic(message, help="install g++, or name a compiler in the variable CXX")]
        return export_errors(model)

    def write(self, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        exported = model_programs(model, inputs)
        with suppress_messages():
            write_libraries(path, exported, model_metadata(model))

    def open(self, path: Path, model: fx.GraphModule) -> Opened:
        return _Compiled(path, model)


class _Compiled(Programs):
    """The libraries of an archive."""

    def __init__(self, path: Path, model: fx.GraphModule) -> None:
        super().__init__(graph_of(model))
        with suppress_messages():
            self._libraries, self._weights = read_libraries(path)
        self._model = model

    def takes(self, name: str) -> list[str]:
        return arguments_of(self._libraries[name])

    def run(self, name: str, inputs: dict[str, Any]) -> list[Tensor]:
        # Compiled code assumes the memory layout of the example inputs, and ignores strides.
        dense = {key: value.contiguous() if isinstance(value, Tensor) else value for key, value in inputs.items()}
        with torch.no_grad():
            return as_tensors(self._libraries[name](**dense))

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights[MODEL]

    def outputs(self, inputs: Inputs, calls: Mapping[str, ComponentCall]) -> Mapping[str, Tensor]:
        """Run the uncompiled program, because compiled code has no modules."""
        watched = Watched(export_module(self._model, export_inputs(self._model), fixed=fixed_lengths(self.graph)))
        with torch.no_grad():
            watched.run(*program_arguments(self.graph, inputs, inputs_of(self._model)).values())
        return watched.outputs

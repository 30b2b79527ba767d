"""AOTInductor: the programs of `pt2.py`, compiled to machine code for this kind of processor.

One archive with a library for each program, and the weights, once:
`load_pt2(FILE, load_weights_from_disk=True)` of `torch.export.pt2_archive._package`.
https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.builder import graph_of, inputs_of
from tfkit.errors import Diagnostic
from tfkit.graph.inputs import fixed_lengths
from tfkit.tools.common.comparison_inputs import as_tensors, example
from tfkit.tools.export.failing_component import quiet
from tfkit.tools.export.format import Call, Format, Inputs, Opened, metadata
from tfkit.tools.export.pieces import Programs, complete
from tfkit.tools.export.programs import MODEL, Watched, exported, programs, refusals
from tfkit.torch_private.programs import arguments_of, has_compiler, read_libraries, write_libraries


class Aoti(Format):
    """The programs of `torch.export`, compiled ahead of time."""

    name = "aoti"
    description = "pt2 compiled for this machine by AOTInductor"

    def refusals(self, model: fx.GraphModule) -> list[Diagnostic]:
        if not has_compiler():
            message = "AOTInductor needs a C++ compiler, but there is none"
            return [Diagnostic(message, help="install g++, or name one in the variable CXX")]
        return refusals(model)

    def write(self, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        exported = programs(model, inputs)
        with quiet():
            write_libraries(path, exported, metadata(model))

    def open(self, path: Path, model: fx.GraphModule) -> Opened:
        return _Compiled(path, model)


class _Compiled(Programs):
    """The libraries of an archive."""

    def __init__(self, path: Path, model: fx.GraphModule) -> None:
        super().__init__(graph_of(model))
        with quiet():
            self._libraries, self._weights = read_libraries(path)
        self._model = model

    def takes(self, name: str) -> list[str]:
        return arguments_of(self._libraries[name])

    def run(self, name: str, inputs: dict[str, Any]) -> list[Tensor]:
        # The code assumes the memory layout of its inputs at compile time, and ignores strides.
        dense = {key: value.contiguous() if isinstance(value, Tensor) else value for key, value in inputs.items()}
        with torch.no_grad():
            return as_tensors(self._libraries[name](**dense))

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights[MODEL]

    def outputs(self, inputs: Inputs, calls: Mapping[str, Call]) -> Mapping[str, Tensor]:
        """Run the uncompiled program, because compiled code has no modules."""
        watched = Watched(exported(self._model, example(self._model), fixed=fixed_lengths(self.graph)))
        with torch.no_grad():
            watched.run(*complete(self.graph, inputs, inputs_of(self._model)).values())
        return watched.outputs

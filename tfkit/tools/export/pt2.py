"""`torch.export`: programs of tensor operations that torch loads anywhere, without the Python that wrote them.

An archive with several programs (see `programs.py`), and their weights, once. `torch.export.load` gives the whole
model; `load_pt2` of `torch.export.pt2_archive._package` all programs, by name.
https://docs.pytorch.org/docs/stable/export.html
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.builder import graph_of
from tfkit.errors import Diagnostic
from tfkit.tools.common.comparison_inputs import as_tensors
from tfkit.tools.export.failing_component import quiet
from tfkit.tools.export.format import Call, Format, Inputs, Opened, metadata
from tfkit.tools.export.pieces import Programs, complete
from tfkit.tools.export.programs import MODEL, Watched, programs, refusals
from tfkit.torch_private.programs import arguments_of, read_programs, write_programs


class Pt2(Format):
    """Programs of `torch.export` with free shapes: the whole sequence, and the steps of cached decoding."""

    name = "pt2"
    suffixes = (".pt2",)
    description = "torch.export: programs of tensor operations, loaded by torch"

    def refusals(self, model: fx.GraphModule) -> list[Diagnostic]:
        return refusals(model)

    def write(self, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        write_programs(path, programs(model, inputs), metadata(model))

    def open(self, path: Path, model: fx.GraphModule) -> Opened:
        return _Loaded(path, model)


class _Loaded(Programs):
    """The programs of an archive."""

    def __init__(self, path: Path, model: fx.GraphModule) -> None:
        super().__init__(graph_of(model))
        with quiet():
            self._programs = read_programs(path)
        self._modules: dict[str, fx.GraphModule] = {}
        for program in self._programs.values():  # each was read with its own weights
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

    def outputs(self, inputs: Inputs, calls: Mapping[str, Call]) -> Mapping[str, Tensor]:
        arguments = complete(self.graph, inputs, self.takes(MODEL))
        watched = Watched(self._programs[MODEL])
        with torch.no_grad():
            watched.run(*arguments.values())
        return watched.outputs

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
from torch.export import ExportedProgram

from tfkit.builder import graph_of
from tfkit.errors import Diagnostic
from tfkit.tools.comparison_inputs import as_tensors
from tfkit.tools.export.failing_component import quiet
from tfkit.tools.export.format import Call, Format, Inputs, Opened, metadata
from tfkit.tools.export.pieces import Programs, complete
from tfkit.tools.export.programs import MODEL, Watched, programs, refusals


class Pt2(Format):
    """Programs of `torch.export` with free shapes: the whole sequence, and the steps of cached decoding."""

    name = "pt2"

    def refusals(self, model: fx.GraphModule) -> list[Diagnostic]:
        return refusals(model)

    def write(self, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        package(programs(model, inputs), path, metadata(model))

    def open(self, path: Path, model: fx.GraphModule) -> Opened:
        return _Loaded(path, model)


def package(made: Mapping[str, ExportedProgram], path: Path, extra: Mapping[str, str]) -> None:
    """Write an archive of programs.

    It equals the archive of torch's own `package_pt2` but for the weights: that writes those of each program again,
    while here all others point to those of the first one.
    """
    from torch._export.serde import schema
    from torch._export.serde.serialize import serialize
    from torch.export.pt2_archive import _package as archive
    from torch.export.pt2_archive import constants as at

    weights: dict[str, Any] = {}
    with archive.PT2ArchiveWriter(str(path)) as writer:
        for name, program in made.items():
            program.example_inputs = None
            if not weights:
                weights = archive._package_state_dict(name, program, writer).config
            own = schema.PayloadConfig(config={key: weights[key] for key in program.state_dict})
            archive._package_payload_config(writer, own, at.WEIGHTS_CONFIG_FILENAME_FORMAT.format(name))
            constants = archive._package_constants(name, program, writer)
            archive._package_payload_config(writer, constants, at.CONSTANTS_CONFIG_FILENAME_FORMAT.format(name))
            written = serialize(program, serialize_state_dict=False, serialize_constants=False)
            writer.write_bytes(at.MODELS_FILENAME_FORMAT.format(name), written.exported_program)
            writer.write_bytes(at.SAMPLE_INPUTS_FILENAME_FORMAT.format(name), written.example_inputs)
        archive._package_extra_files(writer, dict(extra))


class _Loaded(Programs):
    """The programs of an archive."""

    def __init__(self, path: Path, model: fx.GraphModule) -> None:
        super().__init__(graph_of(model))
        from torch.export.pt2_archive._package import load_pt2

        with quiet():
            self._programs = load_pt2(str(path)).exported_programs
        self._modules: dict[str, fx.GraphModule] = {}
        for program in self._programs.values():  # each was read with its own weights
            program.state_dict.update({key: self.weights()[key] for key in program.state_dict})

    def takes(self, name: str) -> list[str]:
        """The argument names of a program."""
        return list(self._programs[name].call_spec.in_spec.child(1).context)

    def run(self, name: str, given: dict[str, Any]) -> list[Tensor]:
        """The results of a program."""
        if name not in self._modules:
            self._modules[name] = self._programs[name].module()
        with torch.no_grad():
            return as_tensors(self._modules[name](**given))

    def weights(self) -> Mapping[str, Tensor]:
        return self._programs[MODEL].state_dict

    def outputs(self, inputs: Inputs, calls: Mapping[str, Call]) -> Mapping[str, Tensor]:
        given = complete(self.graph, inputs, self.takes(MODEL))
        watched = Watched(self._programs[MODEL])
        with torch.no_grad():
            watched.run(*given.values())
        return watched.outputs

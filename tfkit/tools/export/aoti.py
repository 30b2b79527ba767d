"""AOTInductor: the programs of `pt2.py`, compiled to machine code for this kind of processor.

One archive with a library for each program and, beside them, the weights, once:
`load_pt2(FILE, load_weights_from_disk=True)` of `torch.export.pt2_archive._package`.
https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import treespec_loads

from tfkit.builder import graph_of, inputs_of
from tfkit.errors import Diagnostic
from tfkit.graph.inputs import fixed_lengths
from tfkit.tools.comparison_inputs import as_tensors, example
from tfkit.tools.export.failing_component import quiet
from tfkit.tools.export.format import Call, Format, Inputs, Opened, metadata
from tfkit.tools.export.pieces import Programs, complete
from tfkit.tools.export.programs import MODEL, Watched, exported, programs, refusals

OPTIONS = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
}
"""The weights of a program as files of the archive; libraries would each contain them again."""


class Aoti(Format):
    """The programs of `torch.export`, compiled ahead of time."""

    name = "aoti"

    def refusals(self, model: fx.GraphModule) -> list[Diagnostic]:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            message = "AOTInductor needs a C++ compiler, but there is none"
            return [Diagnostic(message, help="install g++, or name one in the variable CXX")]
        return refusals(model)

    def write(self, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        from torch._inductor import aot_compile
        from torch.export.pt2_archive._package import package_pt2

        made = programs(model, inputs)
        with quiet():
            files: dict[str, Any] = {}
            for name, program in made.items():
                assert program.example_inputs is not None
                files[name] = aot_compile(program.module(), *program.example_inputs, options=dict(OPTIONS))
            package_pt2(str(path), aoti_files=files, extra_files=metadata(model))

    def open(self, path: Path, model: fx.GraphModule) -> Opened:
        return _Compiled(path, model)


class _Compiled(Programs):
    """The libraries of an archive."""

    def __init__(self, path: Path, model: fx.GraphModule) -> None:
        super().__init__(graph_of(model))
        from torch.export.pt2_archive._package import load_pt2

        with quiet():
            self._runners = load_pt2(str(path)).aoti_runners
        self._weights = _load_weights(path, self._runners)
        self._model = model

    def takes(self, name: str) -> list[str]:
        """The argument names of a program."""
        takes, _ = self._runners[name].loader.get_call_spec()
        return list(treespec_loads(takes).child(1).context)

    def run(self, name: str, given: dict[str, Any]) -> list[Tensor]:
        """The results of a program."""
        # The code assumes the memory layout of its inputs at compile time, and ignores strides.
        dense = {key: value.contiguous() if isinstance(value, Tensor) else value for key, value in given.items()}
        with torch.no_grad():
            return as_tensors(self._runners[name](**dense))

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights[MODEL]

    def outputs(self, inputs: Inputs, calls: Mapping[str, Call]) -> Mapping[str, Tensor]:
        """The outputs of the uncompiled program: compiled code has no modules."""
        watched = Watched(exported(self._model, example(self._model), fixed=fixed_lengths(self.graph)))
        with torch.no_grad():
            watched.run(*complete(self.graph, inputs, inputs_of(self._model)).values())
        return watched.outputs


def _load_weights(path: Path, runners: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Give the libraries their weights: shared by all of them, they must live as long as the libraries."""
    from torch.export.pt2_archive._package import PT2ArchiveReader

    files: dict[str, Tensor] = {}
    weights: dict[str, dict[str, Tensor]] = {}
    with PT2ArchiveReader(str(path)) as archive:
        for name, runner in runners.items():
            places = json.loads(archive.read_string(f"data/aotinductor/{name}/weights_config.json"))
            for file, *_ in places.values():
                if file not in files:
                    files[file] = torch.load(io.BytesIO(archive.read_bytes(f"data/weights/{file}")))
            weights[name] = {key: files[file].as_strided(*layout) for key, (file, *layout) in places.items()}
            runner.load_constants(weights[name], check_full_update=True, user_managed=True)
    return weights

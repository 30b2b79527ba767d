"""Archives of several programs of `torch.export`, and of AOTInductor's libraries.

`torch.export.save` writes a single program. torch's archive of several programs, `package_pt2`, has no public name, and
stores shared weights once per program. This file does not work with torch 2.9, whose `serialize` cannot omit weights.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.export import ExportedProgram
from torch.utils._pytree import treespec_loads

OPTIONS = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
}
"""Options that store the weights of a library as files of the archive."""


def write_programs(path: Path, programs: Mapping[str, ExportedProgram], extra: Mapping[str, str]) -> None:
    """Write an archive of programs, by name.

    The format is the format of `package_pt2`, but all programs refer to the weights of the first program.
    """
    from torch._export.serde import schema
    from torch._export.serde.serialize import serialize
    from torch.export.pt2_archive import _package as archive
    from torch.export.pt2_archive import constants as at

    weights: dict[str, Any] = {}
    with archive.PT2ArchiveWriter(str(path)) as writer:
        for name, program in programs.items():
            program.example_inputs = None
            if not weights:
                weights = archive._package_state_dict(name, program, writer).config
            payload = schema.PayloadConfig(config={key: weights[key] for key in program.state_dict})
            archive._package_payload_config(writer, payload, at.WEIGHTS_CONFIG_FILENAME_FORMAT.format(name))
            constants = archive._package_constants(name, program, writer)
            archive._package_payload_config(writer, constants, at.CONSTANTS_CONFIG_FILENAME_FORMAT.format(name))
            written = serialize(program, serialize_state_dict=False, serialize_constants=False)
            writer.write_bytes(at.MODELS_FILENAME_FORMAT.format(name), written.exported_program)
            writer.write_bytes(at.SAMPLE_INPUTS_FILENAME_FORMAT.format(name), written.example_inputs)
        archive._package_extra_files(writer, dict(extra))


def read_programs(path: Path) -> dict[str, ExportedProgram]:
    """Read the programs of an archive by name, each with its weights."""
    from torch.export.pt2_archive._package import load_pt2

    return load_pt2(str(path)).exported_programs


def has_compiler() -> bool:
    """Return True if AOTInductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def write_libraries(path: Path, programs: Mapping[str, ExportedProgram], extra: Mapping[str, str]) -> None:
    """Compile programs, and write an archive of the libraries that contains their weights once."""
    from torch._inductor import aot_compile
    from torch.export.pt2_archive._package import package_pt2

    files: dict[str, Any] = {}
    for name, program in programs.items():
        assert program.example_inputs is not None
        files[name] = aot_compile(program.module(), *program.example_inputs, options=dict(OPTIONS))
    package_pt2(str(path), aoti_files=files, extra_files=dict(extra))


def read_libraries(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Return the callable libraries of an archive by name, and their weights, which must outlive the libraries."""
    from torch.export.pt2_archive._package import PT2ArchiveReader, load_pt2

    libraries = load_pt2(str(path)).aoti_runners
    files: dict[str, Tensor] = {}
    weights: dict[str, dict[str, Tensor]] = {}
    with PT2ArchiveReader(str(path)) as archive:
        for name, library in libraries.items():
            places = json.loads(archive.read_string(f"data/aotinductor/{name}/weights_config.json"))
            for file, *_ in places.values():
                if file not in files:
                    files[file] = torch.load(io.BytesIO(archive.read_bytes(f"data/weights/{file}")))
            weights[name] = {key: files[file].as_strided(*layout) for key, (file, *layout) in places.items()}
            library.load_constants(weights[name], check_full_update=True, user_managed=True)
    return libraries, weights


def arguments_of(called: ExportedProgram | Any) -> list[str]:
    """Return the names of the arguments of a program, or of a library."""
    if isinstance(called, ExportedProgram):
        return list(called.call_spec.in_spec.child(1).context)
    takes, _ = called.loader.get_call_spec()
    return list(treespec_loads(takes).child(1).context)


def decomposed(program: ExportedProgram) -> ExportedProgram:
    """Return a program in which every operation that torch can decompose is decomposed."""
    return program.run_decompositions(dict(decomposition_table))

"""Archives of several programs of `torch.export`, and of AOTInductor's libraries.

`torch.export.save` writes a single program. torch's archive of several programs, `package_pt2`, has no public name, and
stores shared weights once per program.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from tfkit.torch_private import optional_name, private_name

PT2, AOTI = "files of the format pt2", "files of the format aoti"
OPTIONS = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
}
"""Options that store the weights of a library as files of the archive."""
LOAD = "torch.export.pt2_archive._package.load_pt2"


def write_programs(path: Path, programs: Mapping[str, ExportedProgram], extra: Mapping[str, str]) -> None:
    """Write an archive of programs, by name.

    The format is the format of `package_pt2`, but all programs refer to the weights of the first program.
    """
    from torch.export.pt2_archive import constants as at

    config_of = private_name("torch._export.serde.schema.PayloadConfig", PT2)
    serialize = private_name("torch._export.serde.serialize.serialize", PT2)
    package_weights = private_name("torch.export.pt2_archive._package._package_state_dict", PT2)
    package_constants = private_name("torch.export.pt2_archive._package._package_constants", PT2)
    package_config = private_name("torch.export.pt2_archive._package._package_payload_config", PT2)
    package_files = private_name("torch.export.pt2_archive._package._package_extra_files", PT2)
    # torch 2.11 has neither option: it serializes weights into bytes that are not written.
    options = signature(serialize).parameters.keys() & {"serialize_state_dict", "serialize_constants"}
    weights: dict[str, Any] = {}
    with private_name("torch.export.pt2_archive._package.PT2ArchiveWriter", PT2)(str(path)) as writer:
        for name, program in programs.items():
            program.example_inputs = None
            if not weights:
                weights = package_weights(name, program, writer).config
            payload = config_of(config={key: weights[key] for key in program.state_dict})
            package_config(writer, payload, at.WEIGHTS_CONFIG_FILENAME_FORMAT.format(name))
            constants = package_constants(name, program, writer)
            package_config(writer, constants, at.CONSTANTS_CONFIG_FILENAME_FORMAT.format(name))
            written = serialize(program, **dict.fromkeys(options, False))
            writer.write_bytes(at.MODELS_FILENAME_FORMAT.format(name), written.exported_program)
            writer.write_bytes(at.SAMPLE_INPUTS_FILENAME_FORMAT.format(name), written.example_inputs)
        package_files(writer, dict(extra))


def read_programs(path: Path) -> dict[str, ExportedProgram]:
    """Read the programs of an archive by name, each with its weights."""
    return private_name(LOAD, PT2)(str(path)).exported_programs


def has_compiler() -> bool:
    """Return True if AOTInductor finds a C++ compiler."""
    try:
        private_name("torch._inductor.cpp_builder.get_cpp_compiler", AOTI)()
    except RuntimeError:
        return False
    return True


def write_libraries(path: Path, programs: Mapping[str, ExportedProgram], extra: Mapping[str, str]) -> None:
    """Compile programs, and write an archive of the libraries that contains their weights once."""
    compiled = private_name("torch._inductor.aot_compile", AOTI)
    files: dict[str, Any] = {}
    for name, program in programs.items():
        assert program.example_inputs is not None
        files[name] = compiled(program.module(), *program.example_inputs, options=dict(OPTIONS))
    private_name("torch.export.pt2_archive._package.package_pt2", AOTI)(
        str(path), aoti_files=files, extra_files=dict(extra)
    )


def read_libraries(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Return the callable libraries of an archive by name, and their weights, which must outlive the libraries."""
    libraries: dict[str, Any] = private_name(LOAD, AOTI)(str(path)).aoti_runners
    files: dict[str, Tensor] = {}
    weights: dict[str, dict[str, Tensor]] = {}
    with private_name("torch.export.pt2_archive._package.PT2ArchiveReader", AOTI)(str(path)) as archive:
        for name, library in libraries.items():
            locations = json.loads(archive.read_string(f"data/aotinductor/{name}/weights_config.json"))
            for file, *_ in locations.values():
                if file not in files:
                    files[file] = torch.load(io.BytesIO(archive.read_bytes(f"data/weights/{file}")))
            weights[name] = {key: files[file].as_strided(*layout) for key, (file, *layout) in locations.items()}
            library.load_constants(weights[name], check_full_update=True, user_managed=True)
    return libraries, weights


def arguments_of(called: ExportedProgram | Any) -> list[str]:
    """Return the names of the arguments of a program, or of a library."""
    if isinstance(called, ExportedProgram):
        return list(called.call_spec.in_spec.child(1).context)
    takes, _ = called.loader.get_call_spec()
    return list(private_name("torch.utils._pytree.treespec_loads", AOTI)(takes).child(1).context)


def decomposed_program(program: ExportedProgram) -> ExportedProgram:
    """Return a program in which every operation that torch can decompose is decomposed."""
    table = optional_name("torch._decomp.decomposition_table", "finding the component that ONNX cannot express")
    return program if table is None else program.run_decompositions(dict(table))

"""The formats by name. A format's dependencies are imported when it is used."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from tfkit.errors import Diagnostic, SpecError, listing, quoted

if TYPE_CHECKING:
    from tfkit.tools.export.format import Format

FormatName: TypeAlias = Literal["torchscript", "pt2", "aoti", "onnx", "safetensors"]
FORMATS: dict[str, tuple[str, str]] = {
    "torchscript": ("torchscript", "TorchScript"),
    "pt2": ("pt2", "Pt2"),
    "aoti": ("aoti", "Aoti"),
    "onnx": ("onnx", "Onnx"),
    "safetensors": ("safetensors", "Safetensors"),
}
"""Module and class of each format."""
SUFFIXES: dict[str, FormatName] = {
    ".ts": "torchscript",
    ".pt": "torchscript",
    ".pt2": "pt2",
    ".onnx": "onnx",
    ".safetensors": "safetensors",
}


def format_of(name: str) -> Format:
    """The format of that name."""
    module, cls = FORMATS[name]
    made: Format = getattr(importlib.import_module(f"tfkit.tools.export.{module}"), cls)()
    return made


def name_by_suffix(path: Path) -> FormatName:
    """The name of the format that a file's suffix stands for; raises SpecError if there is none."""
    if path.suffix in SUFFIXES:
        return SUFFIXES[path.suffix]
    known = listing(f"{suffix} ({name})" for suffix, name in SUFFIXES.items())
    message = f"the suffix of {quoted(path.name)} does not name a format"
    raise SpecError(Diagnostic(message, notes=(f"those that do: {known}",), help=f"--format {listing(FORMATS)}"))

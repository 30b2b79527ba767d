"""The built-in formats, registered as a plugin of tfkit."""

from __future__ import annotations

import tfkit
from tfkit.tools.export.formats import Format, Safetensors
from tfkit.tools.export.onnx import Onnx
from tfkit.tools.export.pt2 import Aoti, Pt2
from tfkit.tools.export.torchscript_format import TorchScript


@tfkit.hookimpl
def tfkit_export_formats() -> list[type[Format]]:
    """Return the built-in formats."""
    return [TorchScript, Pt2, Aoti, Onnx, Safetensors]

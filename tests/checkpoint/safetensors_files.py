"""A small valid checkpoint, handwritten files, and the form of an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tfkit.checkpoint.files import TensorFiles
from tfkit.errors import Diagnostic, SpecError
from tfkit.spec.header import how_to_convert

TENSORS = {"up": torch.arange(6.0).reshape(2, 3), "down": torch.arange(4).to(torch.bfloat16)}
AGAIN = "   = help: the file is damaged or was made to look like a checkpoint: fetch it again from its source"


def convert(path: str) -> str:
    """Return the help for a pickle."""
    return Diagnostic("", help=how_to_convert(Path(path))).render().partition("\n")[2]


def refused(path: str) -> str:
    with pytest.raises(SpecError) as error:
        TensorFiles.open(path)
    return str(error.value)


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: Any = 0, end: Any = 8, shape: Any = (2,), dtype: Any = "F32", **options: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end], **options}


def assert_holds(checkpoint: TensorFiles, tensors: dict[str, torch.Tensor] = TENSORS) -> None:
    actual = {name: checkpoint.read(name) for name in checkpoint.names}
    assert_same(actual, tensors)
    assert all(checkpoint.names[name][:2] == (tensor.dtype, tuple(tensor.shape)) for name, tensor in actual.items())


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, types, shapes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape)
        assert actual[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))

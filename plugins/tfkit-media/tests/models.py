"""Small models around a block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import tfkit

PLUGINS = tfkit.load_plugins(plugin_dirs=[Path(__file__).parents[1]], entry_points=False)


def spec_of(block: str, fields: Mapping[str, Any], more: Mapping[str, Any] | None, input: Any) -> dict[str, Any]:
    graph = {"front": {"block": block, "d_model": 8, **fields}, **(more or {})}
    return {"tfkit": 1, "name": "small", "inputs": {"x": input}, "graph": graph}


def sequence_of(
    block: str, fields: Mapping[str, Any], more: Mapping[str, Any] | None = None, *, input: Any = None, **sizes: int
) -> torch.fx.GraphModule:
    """A model of a block that reads an image, or another input, with random weights."""
    image = {"type": "image", "channels": 2, "height": 8, "width": 8, **sizes}
    model = tfkit.build(tfkit.load(spec_of(block, fields, more, input or image), plugins=PLUGINS)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def error_of(block: str, fields: Mapping[str, Any], *, input: Any = None) -> str:
    """The error of such a model."""
    with pytest.raises(tfkit.SpecError) as error:
        sequence_of(block, fields, input=input)
    return str(error.value)

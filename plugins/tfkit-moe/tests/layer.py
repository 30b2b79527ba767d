"""One layer of experts, built as a model builds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from tfkit_moe import MoE

import tfkit

PLUGINS = tfkit.load_plugins(plugin_dirs=[Path(__file__).parents[1]], entry_points=False)


def spec(d_model: int = 16, **fields: Any) -> str:
    """An encoder of one layer, with `fields` for its experts."""
    encoder = {"block": "encoder", "n_layers": 1, "final_norm": False, "attention": {"kind": "mha", "n_heads": 2}}
    return yaml.safe_dump(
        {
            "tfkit": 1,
            "name": "test",
            "d_model": d_model,
            "inputs": {"x": {"type": "features", "width": d_model}},
            "graph": {"encoder": {**encoder, "ffn": {"kind": "moe", **fields}}},
        },
        sort_keys=False,
    )


def layer(dtype: torch.dtype | None = None, **fields: Any) -> MoE:
    """The layer of `spec`."""
    model = tfkit.build(tfkit.loads(spec(**fields), plugins=PLUGINS), dtype=dtype)
    actual = model.get_submodule("encoder.layers.0.ffn")
    assert isinstance(actual, MoE)
    return actual

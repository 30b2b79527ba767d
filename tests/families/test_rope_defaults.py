"""Rotary positions where config.json does not say them: as the config class of transformers has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import tfkit
from tfkit.tools.import_.importing import export_config, families, import_config

from ..known import KNOWN
from ..sampling import some
from .llama_kin import LLAMA, LLAMA_KIN

FIXED = {"type", "beta_fast", "beta_slow", "truncate", "max_position_embeddings", "llama_4_scaling_beta"}
"""Fields that only one of the two writes, where they have their usual values."""
NEEDED = {"ministral3"}
"""Types whose rotary position is required: a part of it that is left out depends on what else is there."""


def plain(parameters: dict[str, Any]) -> dict[str, Any]:
    """The fields that matter; a factor of 1 is that of whole heads."""
    said = {key: plain(value) if isinstance(value, dict) else value for key, value in parameters.items()}
    return {
        key: value for key, value in said.items() if key not in FIXED and (key, value) != ("partial_rotary_factor", 1)
    }


@pytest.mark.parametrize("name", some(sorted({case.model_type for case in LLAMA_KIN.values()} - NEEDED), 8))
def test_sizes_alone(name: str, tmp_path: Path) -> None:
    family = tfkit.load(families(KNOWN)[name]).spec.family
    assert family is not None
    width = {"head_dim": 16} if "head_dim" in family.fields else {}
    fields = {**LLAMA, "model_type": name, "hidden_size": 64, "num_hidden_layers": 8, **width}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    found = export_config(import_config(tmp_path).graph)
    assert plain(found["rope_parameters"]) == plain(theirs.rope_parameters)
    if "layer_types" in found:
        assert found["layer_types"] == theirs.layer_types

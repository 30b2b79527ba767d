"""The types of GLM's layers: a list, the numbers that give it, and values that cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tfkit

CONFIG = {
    "model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 6,
    "vocab_size": 61, "hidden_size": 32,
}  # fmt: skip


def takers(folder: Path, **fields: Any) -> list[int]:
    """Import a config.json, and return the numbers of the layers that take a choice."""
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    stack = tfkit.import_config(folder).graph.node("decoder").config.stack()
    return [number for number, layer in enumerate(stack.layers) if layer.steps[0].takes]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, []),
        ({"indexer_types": ["full", "shared", "shared", "full", "full", "shared"]}, [1, 2, 5]),
        ({"index_topk_freq": 3}, [2, 3, 5]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [1, 3, 5]),
    ],
)
def test_types_of_layers(fields: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    assert takers(tmp_path, **fields) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer_types": ["shared"] * 6}, "the first layer must be full: no earlier layer has an index"),
        ({"indexer_types": ["full"] * 5}, "`indexer_types` must be a list of 6 types, each full or shared"),
        ({"indexer_types": ["full"] * 5 + ["half"]}, "`indexer_types` must be a list of 6 types, each full or shared"),
        ({"index_topk_freq": 0}, "`index_topk_freq` must be a positive integer; got 0"),
    ],
)
def test_types_that_cannot_work(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(tfkit.SpecError, match=message):
        takers(tmp_path, **fields)

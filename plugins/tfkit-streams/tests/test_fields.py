"""Fields of Gemma 3n and Gemma 4: sparse layers, layers that share keys, and sizes of layers with full attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3nTextConfig

import tfkit

PUBLISHED = json.loads((Path(__file__).parents[3] / "tests/published/gemma4_e2b.json").read_text(encoding="utf-8"))
SLIDING, FULL = "sliding_attention", "full_attention"
SLIDING_ROPE = {SLIDING: {"rope_theta": 1e4}}


def decoder(folder: Path, **changes: Any) -> Any:
    """Import a config.json with six layers, and return its decoder."""
    fields = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL] * 3} | changes
    (folder / "config.json").write_text(json.dumps(PUBLISHED | fields), encoding="utf-8")
    return tfkit.import_config(folder).graph.spec.model.graph["decoder"]


def layers(folder: Path, **changes: Any) -> list[str]:
    return [layer.name for layer in decoder(folder, **changes).stack().layers]


def test_the_last_layers_take_keys_of_their_type(tmp_path: Path) -> None:
    assert layers(tmp_path) == ["base", "full", "base", "full", "local_shared", "full_shared"]
    stack = decoder(tmp_path, num_kv_shared_layers=1)
    names = [layer.name for layer in stack.stack().layers]
    assert names == ["base", "full", "base", "full", "base", "full_shared"]
    assert stack.attention.kv_name is None, "no layer takes the keys of a window"
    assert layers(tmp_path, num_kv_shared_layers=0, layer_types=[SLIDING] * 6) == ["base"] * 5 + ["full"]


@pytest.mark.parametrize("n_layers", [9, 10, 11, 13])
def test_the_sparse_layers_by_default_are_those_of_transformers(n_layers: int, tmp_path: Path) -> None:
    types = [SLIDING, *[FULL] * (n_layers - 1)]
    fields: dict[str, Any] = {"num_hidden_layers": n_layers, "num_kv_shared_layers": 0, "layer_types": types}
    fields |= {"vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": "gemma3n_text"}), encoding="utf-8")
    sparsity = list(tfkit.import_config(tmp_path).graph.spec.model.graph["decoder"].ffn.sparsity)
    assert sparsity + [0.0] * (n_layers - len(sparsity)) == Gemma3nTextConfig(**fields).activation_sparsity_pattern


def test_layers_with_full_attention_have_sizes_and_a_rotation(tmp_path: Path) -> None:
    """The number of channels that a proportional rotation turns is rounded down to an even number."""
    rope = {
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.35},
        SLIDING: {"rope_theta": 1e4},
    }
    for fields in ({"global_head_dim": 20}, {"per_layer_config": {str(i): {"head_dim": 20} for i in (1, 3, 5)}}):
        stack = decoder(tmp_path, rope_parameters=rope, **fields)
        full = stack.layers.variants["full"].attention
        assert (stack.attention.head_width, full.head_width, full.position.scaling.width) == (256, 20, 6)
        assert stack.ffn.d_ff * 2 == stack.layers.variants["full_shared"].ffn.d_ff
    assert decoder(tmp_path, per_layer_config={}).layers.variants["full"].attention.head_width == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 6}, "`num_kv_shared_layers` must be an integer from 0 to 5; got 6"),
        (
            {"num_kv_shared_layers": 4, "layer_types": [FULL] * 3 + [SLIDING] * 3},
            "no layer before them is of variant `base`",
        ),
        (
            {"per_layer_config": {"0": {"head_dim": 8}}},
            "only layers with full attention can have other sizes; got layer 0",
        ),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "`head_dim` must be equal in layers with full attention"),
        ({"per_layer_config": {"1": {"sliding_window": 8}}}, "`sliding_window` must be equal in all layers"),
        ({"per_layer_config": 3}, "only layers with full attention can have other sizes; got `3`"),
        ({"per_layer_config": {"1": 3}}, "the sizes of layer 1 must be a mapping; got `3`"),
        ({"hidden_size_per_layer_input": 0}, "`hidden_size_per_layer_input` must be a positive integer"),
        ({"use_double_wide_mlp": "yes"}, "`use_double_wide_mlp` must be true or false; got `yes`"),
        (
            {
                "rope_parameters": {
                    **SLIDING_ROPE,
                    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "factor": 2.0},
                }
            },
            "the `factor` of a proportional rotation must be 1; got `2.0`",
        ),
        (
            {"rope_parameters": {**SLIDING_ROPE, FULL: {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}},
            "gemma4_text rotates entire heads",
        ),
    ],
)
def test_fields_that_no_spec_can_express(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(tfkit.SpecError, match=message):
        decoder(tmp_path, **changes)

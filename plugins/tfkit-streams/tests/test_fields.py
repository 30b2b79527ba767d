"""Fields of Gemma 3n and Gemma 4: sparse layers, layers that share keys, and sizes of layers with full attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3nTextConfig

import tfkit

FILES = Path(__file__).parents[3] / "tests/published"
PUBLISHED = json.loads((FILES / "gemma4_e2b.json").read_text(encoding="utf-8"))
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


def test_full_layers_have_keys_as_values_and_their_number_of_heads(tmp_path: Path) -> None:
    for heads, expected in ((2, 2), (None, 4)):
        stack = decoder(tmp_path, num_key_value_heads=4, attention_k_eq_v=True, num_global_key_value_heads=heads)
        full, taking = (stack.layers.variants[name].attention for name in ("full", "full_shared"))
        assert (stack.attention.values, full.values, taking.values) == (None, "keys", None)
        assert (stack.attention.n_kv_heads, full.n_kv_heads, taking.n_kv_heads) == (4, expected, expected)
    full = decoder(tmp_path, num_key_value_heads=4, num_global_key_value_heads=2).layers.variants["full"].attention
    assert (full.values, full.n_kv_heads) == (None, 4)
    sizes = {str(i): {"head_dim": 20, "num_key_value_heads": 1} for i in (1, 3, 5)}
    full = decoder(tmp_path, num_key_value_heads=4, per_layer_config=sizes).layers.variants["full"].attention
    assert (full.values, full.n_kv_heads, full.head_width) == (None, 1, 20)


def test_values_with_a_projection_where_the_first_spec_has_keys(tmp_path: Path) -> None:
    """The first spec of `gemma4_unified_text` has its values from the keys, and one head of them in full layers."""
    fields = json.loads((FILES / "gemma4_12b.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(fields | {"attention_k_eq_v": False}), encoding="utf-8")
    full = tfkit.import_config(tmp_path).graph.spec.model.graph["decoder"].layers.variants["full"].attention
    assert (full.values, full.n_kv_heads) == (None, 8)


def test_experts_are_next_to_the_ffn_with_and_without_features(tmp_path: Path) -> None:
    experts = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 12}
    stack = decoder(tmp_path, hidden_activation="silu", rms_norm_eps=1e-4, **experts)
    assert [step.norm_in for step in stack.sublayers] == [None, False, False]
    full = stack.layers.variants["full_shared"].ffn
    assert (stack.ffn.d_ff, stack.ffn.shared.d_ff, full.d_ff, full.shared.d_ff) == (12, 6144, 12, 2 * 6144)
    assert (stack.ffn.n_experts, stack.ffn.n_experts_per_token) == (6, 2)
    assert stack.ffn.activation.kind_name() == "silu"
    assert stack.ffn.router.logit_scale == 1536**-0.5
    norms = (stack.ffn.norm_in, stack.ffn.norm_out, stack.ffn.router.norm, stack.ffn.shared.norm_in)
    assert {norm.eps for norm in (*norms, stack.ffn.shared.norm_out)} == {1e-4}
    stack = decoder(tmp_path, hidden_size_per_layer_input=0, **experts)
    assert [step.sublayer for step in stack.sublayers] == ["attention", "ffn"]
    assert (stack.mixer, stack.layer_features, stack.sublayers[1].norm_in) == (None, None, False)


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
        ({"per_layer_config": {"1": {"head_dim": [8]}}}, "`head_dim` must be equal in layers with full attention"),
        (
            {"hidden_size_per_layer_input": -1},
            "`hidden_size_per_layer_input` must be 0, or the number of features in each layer; got -1",
        ),
        (
            {"per_layer_config": {str(i): {"head_dim": "8"} for i in (1, 3, 5)}},
            "`head_dim` must be an integer; got `8`",
        ),
        ({"intermediate_size": "d_model"}, "`intermediate_size` must be an integer; got `d_model`"),
        ({"attention_k_eq_v": 1}, "`attention_k_eq_v` must be true or false; got `1`"),
        ({"enable_moe_block": None}, "`enable_moe_block` must be true or false; got `None`"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8}, "5 experts"),
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

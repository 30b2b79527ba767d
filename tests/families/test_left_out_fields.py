"""A field that a config.json omits has the default of transformers; a missing required field is named."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tfkit.component import ABSENT
from tfkit.errors import SpecError
from tfkit.tools.import_.importing import import_config

from .cases import CASES, earlier
from .config_mutations import Mutation, config_of
from .left_out_fields import outcomes

EXCEPT = {
    "bailing_hybrid rope_parameters.original_*": "its class sets its length from `model_max_length` after this",
    "dbrx rope_parameters*": "`attn_config.rope_theta`, which its class ignores, must have the same value",
    "deepseek_v2* qk_rope_head_dim": "`head_dim` is there, too, and still has its value",
    "dots1* layer_types": "the list also says what `max_window_layers` does, which the file has for another depth",
    "laguna* rope_parameters.*_attention": "its class makes a config of this, and no model",
    "phimoe rope_parameters.original_max_position_embeddings": "it is next to it, too, and its class reads neither",
    "hyperclovax* attention_multiplier": "null is the same scale as the number that its class writes",
    "qwen2_moe_* layer_types": "no list is the default: its class has windows in every second layer, so it is required",
}
"""Fields of cases, with `*`, that are refused, or differ; each with the reason."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_field_left_out_means_what_it_does_in_transformers(name: str, tmp_path: Path) -> None:
    actual = outcomes(name, tmp_path)
    failures = {f"{name} {field}": why for field, (verdict, why) in actual.items() if verdict == "wrong"}
    assert {item: why for item, why in failures.items() if not any(fnmatchcase(item, value) for value in EXCEPT)} == {}
    assert any(earlier(name)) or sum(verdict == "equal" for verdict, _ in actual.values()) > 5


@pytest.mark.parametrize(
    ("name", "field", "why"),
    [
        ("llama", "hidden_size", r"`hidden_size` is missing\n.*\(hidden_size\)"),
        ("llama", "vocab_size", r"`vocab_size` is missing\n.*\(vocab_size\)"),
        ("bloom", "hidden_size", r"`hidden_size` is missing\n.*\(hidden_size\)"),
        ("dbrx", "ffn_config.ffn_hidden_size", r"`ffn_config.ffn_hidden_size` is missing\n.*config.json:1:[1-9]\d\d "),
        ("t5gemma", "decoder", "`decoder.hidden_size` is missing"),
        ("cwm", "rope_parameters.rope_type", r"unknown .*: `factor`(.|\n)*`rope_type` names the scaling"),
        (
            "youtu",
            "num_key_value_heads",
            "`num_key_value_heads`, which is missing, gives `16`, but `num_attention_heads`",
        ),
        ("roc_bert", "enable_shape", "`enable_shape` must be `false`"),
        ("flint", "layer_types", r"`layer_types` is missing\n.*\(layer_types\)"),
        ("laguna", "num_experts_per_tok", r"8 experts: there are 6(.|\n)*`num_experts_per_tok` is missing, .* `8`"),
        ("laguna", "num_key_value_heads", r"multiple of n_kv_heads(.|\n)*`num_key_value_heads` is missing, .* `8`"),
    ],
)
def test_an_error_names_the_field_that_is_left_out(name: str, field: str, why: str, tmp_path: Path) -> None:
    config = Mutation(tuple(field.split(".")), ABSENT).of(config_of(name))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(SpecError, match=why):
        import_config(tmp_path)

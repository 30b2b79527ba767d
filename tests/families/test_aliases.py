"""Names of classes and fields in published files that differ from those that transformers writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import tfkit
from tfkit.spec.families import FamilyConfig
from tfkit.tools.compare.comparison import compare
from tfkit.tools.import_.importing import export_config, import_config

from .case import reference
from .cases import CASES
from .llama_kin import LLAMA

EXAONE = {
    **{name: value for name, value in LLAMA.items() if name != "num_hidden_layers"},
    "model_type": "exaone",
    "architectures": ["ExaoneForCausalLM"],
    "head_dim": 12,
    "num_layers": 3,
    "layer_norm_epsilon": 1e-4,
    "activation_function": "relu",
    "embed_dropout": 0.1,
}
SARVAM_MOE = {
    **LLAMA,
    "model_type": "sarvam_moe",
    "architectures": ["SarvamMoEForCausalLM"],
    "head_dim": 12,
    "num_experts": 6,
    "num_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "use_qkv_bias": True,
    "use_bias": False,
    "moe_router_enable_expert_bias": True,
}
SARVAM_MLA = {
    **LLAMA,
    "model_type": "sarvam_mla",
    "architectures": ["SarvamMLAForCausalLM"],
    "num_key_value_heads": 4,
    "num_experts": 6,
    "num_shared_experts": 2,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 8,
    "q_head_dim": 10,
    "head_dim": 12,
    "rope_theta": 1000.0,
    "rope_scaling": {"type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}
FILES: list[dict[str, Any]] = [EXAONE, SARVAM_MOE, SARVAM_MLA]


def write_config(fields: dict[str, Any], folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


@pytest.mark.parametrize("fields", FILES, ids=lambda fields: str(fields["model_type"]))
def test_fields_mean_what_transformers_reads(fields: dict[str, Any], tmp_path: Path) -> None:
    transformers.AutoConfig.from_pretrained(write_config(fields, tmp_path)).save_pretrained(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs/config.json").read_text()).keys().isdisjoint({"num_layers", "num_experts"})
    ours, theirs = (import_config(folder, name="model") for folder in (tmp_path, tmp_path / "theirs"))
    assert ours.graph.spec.model == theirs.graph.spec.model
    assert ours.notes == ()


def test_both_names_of_a_field_must_have_equal_values(tmp_path: Path) -> None:
    import_config(write_config({**EXAONE, "num_hidden_layers": 3}, tmp_path))
    message = "`num_layers` and `num_hidden_layers` name the same field, and must be equal"
    for fields in ({**EXAONE, "num_hidden_layers": 2}, {"num_hidden_layers": 2, **EXAONE}):
        with pytest.raises(tfkit.SpecError, match=message):
            import_config(write_config(fields, tmp_path))


def test_a_folder_with_the_published_class_is_compared_with_the_class_of_transformers(tmp_path: Path) -> None:
    reference(CASES["exaone"]).save_pretrained(tmp_path)  # type: ignore[operator]
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["architectures"] == ["LlamaForCausalLM"]
    write_config({**fields, "architectures": ["ExaoneForCausalLM"]}, tmp_path)
    assert compare(import_config(tmp_path).graph, tmp_path).equal


def test_an_alias_names_a_field_of_the_family() -> None:
    with pytest.raises(ValueError, match="the family has no field `width`"):
        FamilyConfig(model_type="m", architecture="M", tensors={}, aliases={"N": "M", "d": "width"})


def test_a_case_may_be_arithmetic_over_fields(tmp_path: Path) -> None:
    theirs = transformers.AutoConfig.for_model("umt5", **CASES["umt5_scaled"].config)
    theirs.save_pretrained(tmp_path)
    graph = import_config(tmp_path).graph
    assert graph.spec.model.graph["logits"].scale == theirs.d_model**-0.5  # type: ignore[attr-defined]
    fields = export_config(graph, tfkit.load_plugins())
    assert (fields["tie_word_embeddings"], fields["scale_decoder_outputs"]) == (True, True)

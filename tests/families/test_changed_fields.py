"""Every field of a config.json that transformers reads has an effect, and no other field has one."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import transformers

from tfkit.errors import SpecError
from tfkit.tools.import_.importing import import_config

from .cases import CASES, earlier
from .changed_fields import outcomes

EXCEPT = {
    "t5gemma vocab_size=122": "their tables keep 61 rows, and the test draws ids by this field",
    "t5gemma *coder={*'return_dict': False*": "their class cannot run without it, and it changes no number",
    "granitemoehybrid* output_router_logits=True": "an output for training, which its class lacks without experts",
    "* topk_group=0": "experts of no group: theirs takes some of them all the same",
    "falcon* alibi=True": "their class adds ALiBi twice, see the repair of falcon_rw_1b",
    "llama_dynamic max_position_embeddings=3": "the input of the test is longer than the scaled length",
    "llama_dynamic rope_parameters=*'factor': 1.0*": "as above",
    "mpnet pad_token_id=*": "its class counts token 1 as padding, and the test pads with this one",
    "deberta* position_biased_input=True": "the positions of its class count padding in front",
    "glm_moe_dsa indexer_types=['full', 'full']": "its class cannot run without a type for each layer",
    "gemma[34]*_text* vocab_size*=*": "the test draws ids that the table of features lacks",
    "ernie use_task_id=True": "one more input, which the test does not give",
}
"""Changes, with `*`, that give other logits or an error of the test; each with the reason."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_changed_field_is_read_or_refused(name: str, tmp_path: Path) -> None:
    results = outcomes(name, tmp_path)
    failures = {change: why for change, (verdict, why) in results.items() if verdict in ("silent", "wrong", "crashed")}
    assert {change: why for change, why in failures.items() if not excepted(f"{name} {change}")} == {}
    assert any(earlier(name)) or any(verdict == "equal" for verdict, _ in results.values())


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gpt_neo", "attention_layers", ["local", "local", "local", "global"]),
        ("t5", "dense_act_fn", "gelu"),
        ("t5", "is_gated_act", True),
        ("modernbert_decoder", "sliding_window", 2),
    ],
)
def test_fields_that_contradict_each_other(name: str, field: str, value: object, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(CASES[name].model_type, **CASES[name].config).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    import_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(SpecError, match=f"`{field}` is .*, but .* gives"):
        import_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "field", "value", "why"),
    [
        ("mpt", "logit_scale", 0.5, "the class in transformers does not scale logits"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True, "each layer would need a scale of its own"),
        ("xglm", "pad_token_id", 2, "the class zeroes that row of the table of positions"),
        ("bloom", "slow_but_exact", True, "its class leaves out biases then"),
        ("roformer", "rotary_value", True, "attention in tfkit rotates queries and keys only"),
        ("mistral4", "head_dim", 5, "`qk_nope_head_dim [+] qk_rope_head_dim` gives `10`"),
        ("esm", "token_dropout", True, "it scales embeddings by the share of masked tokens"),
        ("roc_bert", "enable_shape", True, "an embedding of tfkit does not join tables side by side"),
        ("albert", "inner_group_num", 2, "layers of a group cannot differ"),
        ("gemma3_text", "use_bidirectional_attention", True, "a decoder of tfkit reads no later tokens"),
        ("qwen3_moe", "decoder_sparse_step", 2, "layers without experts are those in `mlp_only_layers`"),
        ("solar_open", "first_k_dense_replace", 1, "its class has experts in every layer"),
        ("ernie4_5_moe", "moe_layer_end_index", 1, "`num_hidden_layers - 1` gives `2`"),
        ("falcon_40b", "parallel_attn", False, "falcon does not support here"),
        ("falcon", "num_ln_in_parallel_attn", 2, "falcon does not support here"),
        ("phimoe", "num_experts_per_tok", 3, "its class always chooses two experts"),
        ("diffllama", "attention_dropout", 0.1, "its class has none"),
        ("esmc", "head_dim", 4, "`hidden_size // num_attention_heads` gives `8`"),
        ("esmc", "num_key_value_heads", 2, "`num_attention_heads` gives `4`"),
    ],
)
def test_what_no_spec_can_say_is_refused_with_its_reason(
    name: str, field: str, value: object, why: str, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.for_model(CASES[name].model_type, **CASES[name].config).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(SpecError, match=f"`{field}` (must be|is) .*{why}"):
        import_config(tmp_path)


def excepted(change: str) -> bool:
    """True if a change of a case, in words, is one of those exceptions."""
    return any(fnmatchcase(change, pattern) for pattern in EXCEPT)

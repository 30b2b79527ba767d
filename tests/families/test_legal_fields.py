"""Valid values of fields that few published files contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ..sampling import slow
from .cases import CASES
from .generated import HEADS, prove


@dataclass(frozen=True)
class Row:
    """A case of a family with other values of some fields.

    Attributes:
        case: name of the case, which may be a case with another head.
        fields: the values.
        unread: parameters that the class has and does not use with these values: they are left out.
        sides: the sides where padding may be; by default, the sides of the case.
    """

    case: str
    fields: Mapping[str, Any]
    unread: tuple[str, ...] = ()
    sides: tuple[str, ...] = ()

    def __str__(self) -> str:
        fields = (f"{name}={value}" for name, value in self.fields.items() if not isinstance(value, dict | list))
        return " ".join([self.case, *fields])


def rows(cases: str, fields: Mapping[str, Any], *unread: str) -> list[Row]:
    """A row for each of several cases."""
    return [Row(case, fields, unread) for case in cases.split()]


UNTIED = {"tie_word_embeddings": False}
THIRD = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.3}}
DENSE = {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "intermediate_size": 20}
BERTS = "bert ernie megatron_bert nomic_bert roc_bert roformer bert-causal bert-pretraining"
ROBERTAS = """
    roberta bert_generation camembert data2vec_text ibert jina_embeddings_v3 luke mpnet roberta_prelayernorm xlm_roberta
    xlm_roberta_xl roberta-causal
"""
BARTS = "bart blenderbot blenderbot_small m2m_100 marian mbart mvp pegasus plbart bart-sequence bart-question"
EXPERTS = """
    afmoe axk1 cohere2_moe deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite
    granitemoe granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 kolibri1 laguna mellum minimax_m2 mixtral olmoe
    phimoe qwen2_moe qwen3_moe solar_open
"""
ROWS = [
    *rows(BERTS, UNTIED, "cls.predictions.bias"),
    *rows(ROBERTAS, UNTIED, "lm_head.bias"),
    *rows(BARTS, UNTIED, "model.shared.weight"),
    *rows("albert", UNTIED, "predictions.bias"),
    *rows("distilbert electra flaubert gte marian_two_vocabularies xlm bart-causal pegasus-causal", UNTIED),
    *rows("esmc luke rembert", {"tie_word_embeddings": True}),  # the head is never tied
    *rows("fsmt", {"tie_word_embeddings": True, "tgt_vocab_size": 61}),
    Row("mpnet", {"pad_token_id": 0}, sides=("none", "right")),
    *rows("biogpt opt xglm", {"layerdrop": 0.2}),
    *rows("opt", {"_remove_final_layer_norm": True}),
    *rows("gpt_bigcode", {"scale_attn_weights": False}),
    *rows("apertus cwm ultrabert", {"hidden_act": "gelu_pytorch_tanh"}),
    *rows("apertus cwm ultrabert", {"hidden_act": "tanh"}),
    *rows("apertus bert_generation gpt_oss gte nomic_bert", {"hidden_act": "gelu_new"}),
    *rows("gemma2 gemma3_text vaultgemma", {"hidden_activation": "silu"}),
    *rows("gpt2 pegasus", {"activation_function": "sigmoid"}),
    *rows(EXPERTS, {"hidden_act": "gelu"}),
    *rows("gemma gpt_neox", {"hidden_act": "quick_gelu"}),
    *rows("aria_text deepseek_v2 hy_v3", {"mlp_bias": True}),
    *rows("glm glm4 nemotron", {"head_dim": 10, **THIRD}),  # three channels of ten
    *rows("phi3", {"partial_rotary_factor": 0.4}),
    *rows("phi3", {"partial_rotary_factor": 0.99}),
    *rows("mellum", DENSE),
    *rows("mellum", {**DENSE, "hidden_act": "relu"}),
]
QUICK_ROWS = """
    mpnet pad_token_id=0
    apertus hidden_act=gelu_pytorch_tanh
    vaultgemma hidden_activation=silu
    glm head_dim=10
"""


@pytest.mark.parametrize("row", [row if str(row) in QUICK_ROWS else slow(row) for row in ROWS], ids=str)
def test_a_legal_value_is_read_and_written(row: Row, tmp_path: Path) -> None:
    case = CASES[row.case] if row.case in CASES else HEADS[row.case]
    prove(
        replace(
            case,
            config={**case.config, **row.fields},
            uncounted={**case.uncounted, **dict.fromkeys(row.unread, "not read")},
            leaves_out=case.leaves_out or bool(row.unread),
            sides=row.sides or case.sides,
        ),
        tmp_path,
    )

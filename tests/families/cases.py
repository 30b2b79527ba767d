"""Every family by name."""

from __future__ import annotations

from typing import Any

import pytest

from .case import Case
from .decoders import DECODERS
from .encoders import ENCODERS
from .experts import EXPERTS
from .latent import LATENT_KIN
from .llama_kin import LLAMA_KIN
from .mixed_experts import MIXED_EXPERTS
from .seq2seq import SEQ2SEQ

CASES: dict[str, Case] = {
    **DECODERS,
    **LLAMA_KIN,
    **ENCODERS,
    **SEQ2SEQ,
    **EXPERTS,
    **MIXED_EXPERTS,
    **LATENT_KIN,
}

QUICK = frozenset(
    """
    afmoe albert apertus aria_text axk1 bart bert bert_generation bitnet blenderbot_small bloom codegen
    cohere2_moe dbrx deepseek_v2 deepseek_v3 ernie4_5_moe esmc exaone4 falcon flint fsmt gemma gemma2
    gemma3_text glm glm4_moe gpt2 gpt_neox gpt_neox_japanese gpt_oss gptj granite granitemoe granitemoe_swa gte
    helium hunyuan_v1_dense hy_v3 laguna llama llama_dynamic marian minicpm3 ministral3 mistral mistral4 mixtral
    modernbert mpnet mpt nanochat nemotron nomic_bert olmo olmo3 opt pegasus persimmon phi qwen2_moe qwen3
    seed_oss solar_open stablelm starcoder2 t5 t5gemma ultrabert umt5
    """.split()  # noqa: SIM905
)
"""Together they have every kind, every word of a field, every rule and every pattern of tensors that the specs of all
families have, chosen greedily, and the families that most people know."""


def rest_is_slow(names: Any) -> list[Any]:
    """Names as parameters of a test: those of `QUICK`, and the others as slow ones."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]

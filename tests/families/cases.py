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
    afmoe albert apertus axk1 bart bert bitnet bloom bloom_onto_normed codegen cohere2_moe dbrx deepseek_v2
    deepseek_v3 distilbert ernie4_5_moe ernie_tasks exaone4_without_windows falcon_40b falcon_rw_1b flaubert
    flint fsmt gemma gemma2 glm gpt2 gpt_bigcode_mha gpt_neo gpt_neox gpt_neox_japanese gpt_neox_sequential
    gpt_oss gptj granite granitemoe_swa gte helium hunyuan_v1_moe hy_v3 laguna llama llama_dynamic llama_linear
    llama_llama3 llama_yarn_all luke marian_two_vocabularies minicpm3 ministral3 mistral mistral4_bare mixtral
    modernbert modernbert_biases mpnet mpt nanochat nemotron olmo3 opt opt_350m opt_without_affine
    persimmon_without_norms qwen2_moe_windows qwen3 rembert seed_oss_out_bias stablelm_parallel starcoder2 t5
    t5gemma ultrabert umt5 vaultgemma xglm_unscaled
    """.split()  # noqa: SIM905
)
"""The families that most people know; and those of which each has two words of a spec or of a config.json (kinds, keys,
rules of fields, patterns of tensors) that none of the others has, chosen greedily."""


def rest_is_slow(names: Any) -> list[Any]:
    """Names as parameters of a test: those of `QUICK`, and the others as slow ones."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]

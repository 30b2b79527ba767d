"""Decoders that are not derived from Llama, at small sizes, with every option of their families."""

from __future__ import annotations

from typing import Any

from .case import Case

GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "layer_norm_epsilon": 1e-3}
GPT_NEO = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1], [["local"], 2]],
    "window_size": 4,
    "max_position_embeddings": 24,
    "layer_norm_epsilon": 1e-3,
}
HIDDEN = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NEOX = {**HIDDEN, "intermediate_size": 80, "layer_norm_eps": 1e-3}
PARTIAL = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.75}
STRETCHED = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0, "partial_rotary_factor": 0.5}
OPT = {**HIDDEN, "ffn_dim": 80, "max_position_embeddings": 24}
BLOOM = {"vocab_size": 61, "hidden_size": 48, "n_layer": 2, "n_head": 6, "layer_norm_epsilon": 1e-3}
MPT = {
    "vocab_size": 61,
    "d_model": 48,
    "n_layers": 2,
    "n_heads": 6,
    "max_seq_len": 24,
    "layer_norm_epsilon": 1e-3,
    "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.5},
}
FALCON = {**HIDDEN, "layer_norm_epsilon": 1e-3}
GROUPED = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
BIOGPT = {**NEOX, "max_position_embeddings": 24}
XGLM = {
    "vocab_size": 61,
    "d_model": 32,
    "num_layers": 2,
    "attention_heads": 4,
    "ffn_dim": 80,
    "max_position_embeddings": 24,
}
UNSCALED = {"scale_embedding": False, "tie_word_embeddings": False}


def add_alibi_once(model: Any) -> None:
    """Their written-out attention adds ALiBi by itself and again with the mask; that of PyTorch only with the mask."""
    model.config._attn_implementation = "sdpa"


DECODERS: dict[str, Case] = {
    "gpt2": Case("gpt2", {**GPT2, "n_inner": 80}),
    "gpt2_untied": Case("gpt2", {**GPT2, "activation_function": "relu", "tie_word_embeddings": False}),
    "gpt2_unscaled": Case("gpt2", {**GPT2, "scale_attn_weights": False}, std=0.2),
    "gpt_neo": Case("gpt_neo", GPT_NEO),
    "gptj": Case("gptj", {**GPT2, "rotary_dim": 6, "n_inner": 80}),
    "codegen": Case("codegen", {**GPT2, "n_head": 8, "rotary_dim": 2, "n_inner": 80}),
    "gpt_neox": Case("gpt_neox", {**NEOX, "hidden_act": "gelu_fast"}),
    "gpt_neox_sequential": Case(
        "gpt_neox",
        {
            **NEOX,
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": STRETCHED,
        },
    ),
    "opt": Case("opt", {**OPT, "activation_function": "gelu"}),
    "opt_350m": Case("opt", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt_without_affine": Case("opt", {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    "bloom": Case("bloom", BLOOM),
    "bloom_onto_normed": Case(
        "bloom", {**BLOOM, "apply_residual_connection_post_layernorm": True, "tie_word_embeddings": False}
    ),
    "mpt": Case("mpt", MPT),
    "falcon": Case("falcon", {**FALCON, "ffn_hidden_size": 80}),
    "falcon_40b": Case("falcon", {**GROUPED, "bias": True, "tie_word_embeddings": False}),
    "falcon2_11b": Case("falcon", {**GROUPED, "num_ln_in_parallel_attn": 1}),
    "falcon_rw_1b": Case(
        "falcon",
        {**FALCON, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
        repair=add_alibi_once,
    ),
    "phi": Case("phi", {**NEOX, "num_key_value_heads": 2, "qk_layernorm": True}),
    "phi_without_norms": Case("phi", {**NEOX, "rope_parameters": PARTIAL}),
    "biogpt": Case("biogpt", BIOGPT),
    "biogpt_unscaled": Case("biogpt", {**BIOGPT, **UNSCALED, "hidden_act": "relu"}),
    "gpt_bigcode": Case("gpt_bigcode", {**GPT2, "n_inner": 80}),
    "gpt_bigcode_mha": Case("gpt_bigcode", {**GPT2, "multi_query": False, "activation_function": "gelu"}),
    "xglm": Case("xglm", XGLM),
    "xglm_unscaled": Case("xglm", {**XGLM, **UNSCALED, "activation_function": "relu"}),
    "openai-gpt": Case("openai-gpt", GPT2),
    "ctrl": Case("ctrl", {**GPT2, "dff": 80}),
    "persimmon": Case("persimmon", NEOX),
    "persimmon_without_norms": Case("persimmon", {**NEOX, "qk_layernorm": False, "rope_parameters": PARTIAL}),
    "gpt_neox_japanese": Case(
        "gpt_neox_japanese",
        {
            **HIDDEN,
            "num_hidden_layers": 3,
            "intermediate_multiple_size": 3,
            "layer_norm_eps": 1e-3,
            "rope_parameters": PARTIAL,
        },
    ),
}

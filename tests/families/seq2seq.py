"""Encoder-decoders at small sizes, with every option of their families."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .case import Case

T5 = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
}
GATED = {"feed_forward_proj": "gated-gelu"}
SWITCH = {**T5, "num_layers": 4, "encoder_sparse_step": 3, "decoder_sparse_step": 2, "num_experts": 4}

BART = {
    "vocab_size": 61,
    "d_model": 32,
    "max_position_embeddings": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
    "scale_embedding": True,
    "activation_dropout": 0.3,
    "attention_dropout": 0.2,
}
LOGITS_BIAS = {"final_logits_bias": "trained by Marian and kept out of training here"}
SINUSOIDS = {"*.embed_positions.weight": "fixed sinusoids, computed and not stored"}
FSMT = {
    **{name: value for name, value in BART.items() if name != "vocab_size"},
    "src_vocab_size": 61,
    "tgt_vocab_size": 53,
}
TWO_VOCABULARIES = {"decoder_vocab_size": 53, "share_encoder_decoder_embeddings": False}

GEMMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 4,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}


def untie(model: Any) -> None:
    """Give the head a matrix of its own, as in the published files: the config class ties it whatever they say."""
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.25)


def read_without_cache(model: Any) -> None:
    """Mask later targets: the class leaves the mask out where it keeps a cache, as if targets came one by one."""
    model.config.use_cache = False


SEQ2SEQ: dict[str, Case] = {
    "t5": Case("t5", T5, "seq2seq", std=0.2),
    "t5_v1_1": Case(
        "t5",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "seq2seq",
        std=0.15,
        prepare=untie,
    ),
    "longt5": Case("longt5", {**T5, "local_radius": 3}, "seq2seq", std=0.2),
    "longt5_unscaled": Case(
        "longt5", {**T5, **GATED, "local_radius": 2, "tie_word_embeddings": False}, "seq2seq", std=0.15
    ),
    "mt5": Case("mt5", {**T5, **GATED}, "seq2seq", std=0.15, prepare=untie),
    "umt5": Case("umt5", {**T5, **GATED, "tie_word_embeddings": False}, "seq2seq", std=0.15, prepare=untie),
    "umt5_scaled": Case("umt5", {**T5, **GATED}, "seq2seq", std=0.15, prepare=untie),
    # Its class counts padding in front against the capacity.
    "switch_transformers": Case(
        "switch_transformers",
        {**SWITCH, "expert_capacity": 2, "router_bias": True, "dense_act_fn": "gelu"},
        "seq2seq",
        std=0.2,
        alone=True,
    ),
    "switch_transformers_sparse": Case(
        "switch_transformers",
        {**SWITCH, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "expert_capacity": 3},
        "seq2seq",
        std=0.2,
        alone=True,
    ),
    "bart": Case("bart", BART, "seq2seq", alone=True),
    "mbart": Case("mbart", {**BART, "activation_function": "relu"}, "seq2seq", alone=True),
    "pegasus": Case("pegasus", BART, "seq2seq", alone=True, uncounted=SINUSOIDS),
    "marian": Case(
        "marian",
        {**BART, "activation_function": "swish"},
        "seq2seq",
        alone=True,
        buffers=LOGITS_BIAS,
        uncounted=SINUSOIDS,
    ),
    "marian_two_vocabularies": Case(
        "marian", {**BART, **TWO_VOCABULARIES}, "seq2seq", alone=True, buffers=LOGITS_BIAS, uncounted=SINUSOIDS
    ),
    "m2m_100": Case("m2m_100", {**BART, "pad_token_id": 2, "eos_token_id": 1}, "seq2seq"),
    "plbart": Case("plbart", BART, "seq2seq", alone=True),
    "mvp": Case("mvp", BART, "seq2seq", alone=True),
    "blenderbot": Case("blenderbot", BART, "seq2seq", alone=True),
    "blenderbot_small": Case("blenderbot-small", BART, "seq2seq", alone=True),
    "blenderbot_small_undropped": Case("blenderbot-small", {**BART, "dropout": 0.0}, "seq2seq", alone=True),
    "fsmt": Case("fsmt", FSMT, "seq2seq", uncounted=SINUSOIDS, repair=read_without_cache),
    "t5gemma": Case(
        "t5gemma",
        {
            "vocab_size": 61,
            "encoder": GEMMA,
            "decoder": {
                **GEMMA,
                "hidden_size": 24,
                "num_hidden_layers": 2,
                "intermediate_size": 40,
                "sliding_window": 3,
            },
            "attention_dropout": 0.2,
            "dropout_rate": 0.1,
        },
        "seq2seq",
        norm_mean=0.0,
    ),
}

"""Relatives of Llama without a shipped spec: what each changes is a line or two of its spec."""

from __future__ import annotations

from .decoders import LLAMA_CONFIG, LLAMA_ENDS, LLAMA_LAYER, LLAMA_WEIGHTS
from .family import Family, layers
from .mapping import Source

TIED_ENDS = {name: source for name, source in LLAMA_ENDS.items() if name != "logits.output"}
QK_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}

GEMMA = Family(
    "GemmaForCausalLM",
    {**LLAMA_CONFIG, "num_key_value_heads": 1, "head_dim": 16},
    """
        tfkit: 1
        name: gemma
        description: Norm weights that are distances from one, scaled embedding, wide heads
        d_model: 32
        vocab_size: 61
        bias: false
        norm: {kind: rmsnorm, eps: 1e-6, offset: 1}
        graph:
          embedding: {block: embedding, scale: sqrt_d_model}
          decoder:
            block: decoder
            n_layers: 2
            attention: {kind: mqa, n_heads: 4, d_head: 16, position: rope}
            ffn: {kind: geglu, d_ff: 48, approximate: tanh}
          logits: {block: lm_head, tie: embedding}
    """,
    {**TIED_ENDS, **layers("decoder", "model.layers", LLAMA_LAYER)},
    norm_mean=0.0,
)

GEMMA2 = Family(
    "Gemma2ForCausalLM",
    {
        **LLAMA_CONFIG,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "query_pre_attn_scalar": 20,
        "sliding_window": 4,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    """
        tfkit: 1
        name: gemma2
        description: Norms on both sides, soft-caps, and every other layer a sliding window
        d_model: 32
        vocab_size: 61
        bias: false
        norm: {kind: rmsnorm, eps: 1e-6, offset: 1}
        graph:
          embedding: {block: embedding, scale: sqrt_d_model}
          decoder:
            block: decoder
            n_layers: 4
            layers:
              variants:
                local: {attention: {mask: {left: 3}}}
              pattern: [local, base]
            placement: sandwich
            attention:
              kind: gqa
              n_heads: 4
              n_kv_heads: 2
              mask: {right: 0}
              scale: 20 ** -0.5
              softcap: 2.0
              position: rope
            ffn: {kind: geglu, d_ff: 48, approximate: tanh}
          logits: {block: lm_head, tie: embedding, softcap: 3.0}
    """,
    {
        **TIED_ENDS,
        **layers(
            "decoder",
            "model.layers",
            {
                **LLAMA_LAYER,
                "attention_norm_out": "post_attention_layernorm",
                "ffn_norm_in": "pre_feedforward_layernorm",
                "ffn_norm_out": "post_feedforward_layernorm",
            },
        ),
    },
    length=13,
    norm_mean=0.0,
)

OLMO2_LAYER: dict[str, Source] = {
    **{name: source for name, source in LLAMA_LAYER.items() if "norm" not in name},
    **{f"attention.project.{x}": f"self_attn.{x}_proj" for x in "qkv"},
    "attention.project.q_norm": "self_attn.q_norm",
    "attention.project.k_norm": "self_attn.k_norm",
    "attention_norm_out": "post_attention_layernorm",
    "ffn_norm_out": "post_feedforward_layernorm",
}
OLMO2 = Family(
    "Olmo2ForCausalLM",
    {**LLAMA_CONFIG, "rms_norm_eps": 1e-6},
    """
        extends: llama_7b
        name: olmo2
        description: Norms behind the sublayers, and over the full width of queries and keys
        d_model: 32
        vocab_size: 61
        graph:
          decoder:
            n_layers: 2
            placement: output
            attention: {kind: gqa, n_heads: 4, n_kv_heads: 2, position: rope, qk_norm_full: {kind: rmsnorm, eps: 1e-6}}
            ffn: {d_ff: 48}
    """,
    {**LLAMA_ENDS, **layers("decoder", "model.layers", OLMO2_LAYER)},
)

QWEN3 = Family(
    "Qwen3ForCausalLM",
    {**LLAMA_CONFIG, "rms_norm_eps": 1e-6, "head_dim": 12},
    """
        extends: llama_7b
        name: qwen3
        description: Queries and keys of each head are normalized before they are rotated
        d_model: 32
        vocab_size: 61
        graph:
          decoder:
            n_layers: 2
            attention:
              kind: gqa
              n_heads: 4
              n_kv_heads: 2
              d_head: 12
              qk_norm: {kind: rmsnorm, eps: 1e-6}
              position: rope
            ffn: {d_ff: 48}
    """,
    {**LLAMA_ENDS, **layers("decoder", "model.layers", {**LLAMA_LAYER, **QK_NORMS})},
)

COHERE = Family(
    "CohereForCausalLM",
    {**LLAMA_CONFIG, "logit_scale": 0.25, "layer_norm_eps": 1e-5, "rope_theta": 10000.0},
    """
        extends: llama_7b
        name: cohere
        description: No bias in any place, neighbours rotated, scaled logits
        d_model: 32
        vocab_size: 61
        norm: {kind: layernorm, bias: false}
        graph:
          decoder:
            n_layers: 2
            placement: parallel
            attention: {kind: gqa, n_heads: 4, n_kv_heads: 2, position: {kind: rope, style: interleaved}}
            ffn: {d_ff: 48}
          logits: {tie: embedding, scale: 0.25}
    """,
    {
        **TIED_ENDS,
        **layers("decoder", "model.layers", {**LLAMA_LAYER, "input_norm": "input_layernorm"}),
    },
)

GRANITE = Family(
    "GraniteForCausalLM",
    {
        **LLAMA_CONFIG,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 4.0,
    },
    """
        extends: llama_7b
        name: granite
        description: Multipliers on the embedding, the scores, the residuals and the logits
        d_model: 32
        vocab_size: 61
        graph:
          embedding: {scale: 3.0}
          decoder:
            n_layers: 2
            residual: {scale: 0.7}
            attention: {kind: gqa, n_heads: 4, n_kv_heads: 2, scale: 0.2, position: rope}
            ffn: {d_ff: 48}
          logits: {scale: 1 / 4}
    """,
    LLAMA_WEIGHTS,
)

LLAMA_KIN = {
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "olmo2": OLMO2,
    "qwen3": QWEN3,
    "cohere": COHERE,
    "granite": GRANITE,
}

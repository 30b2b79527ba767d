"""Families without a shipped spec, each for what its spec has to say."""

from __future__ import annotations

from .decoders import LLAMA_CONFIG, LLAMA_ENDS
from .encoders import BART_CONFIG, BART_LAYERS
from .family import Family, both, layers, qkv
from .mapping import by_head

GPT_NEOX = Family(
    "GPTNeoXForCausalLM",
    {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "vocab_size": 61,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    """
        tfkit: 1
        name: gpt_neox
        description: Attention and FFN side by side, each after a norm of its own
        d_model: 32
        vocab_size: 61
        graph:
          embedding: embedding
          decoder:
            block: decoder
            n_layers: 2
            placement: parallel_two_norms
            attention: {kind: mha, n_heads: 4, position: {kind: rope, width: d_model / n_heads / 2}}
            ffn: {kind: gelu, d_ff: 48}
          logits: lm_head
    """,
    {
        "embedding.tokens": "gpt_neox.embed_in",
        "decoder.final_norm": "gpt_neox.final_layer_norm",
        "logits.output": "lm_head",
        **layers(
            "decoder",
            "gpt_neox.layers",
            {
                "attention_norm_in": "input_layernorm",
                "attention.project.qkv": by_head("attention.query_key_value", 4),
                "attention.output": "attention.dense",
                "ffn_norm_in": "post_attention_layernorm",
                "ffn.up": "mlp.dense_h_to_4h",
                "ffn.down": "mlp.dense_4h_to_h",
            },
        ),
    },
)

PHI = Family(
    "PhiForCausalLM",
    {**LLAMA_CONFIG, "num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    """
        tfkit: 1
        name: phi
        description: Attention and FFN side by side after one norm, half of each head rotated, biases to the end
        d_model: 32
        vocab_size: 61
        graph:
          embedding: embedding
          decoder:
            block: decoder
            n_layers: 2
            placement: parallel
            attention: {kind: mha, n_heads: 4, position: {kind: rope, width: 4}}
            ffn: {kind: gelu, d_ff: 48, approximate: tanh}
          logits: {block: lm_head, bias: true}
    """,
    {
        **LLAMA_ENDS,
        "decoder.final_norm": "model.final_layernorm",
        **layers(
            "decoder",
            "model.layers",
            {
                "input_norm": "input_layernorm",
                "attention.project.qkv": qkv("self_attn"),
                "attention.output": "self_attn.dense",
                "ffn.up": "mlp.fc1",
                "ffn.down": "mlp.fc2",
            },
        ),
    },
)

FALCON = Family(
    "FalconForCausalLM",
    {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61},
    """
        tfkit: 1
        name: falcon
        description: One head of keys and values for all queries, biases only in the norms
        d_model: 32
        vocab_size: 61
        bias: false
        graph:
          embedding: embedding
          decoder:
            block: decoder
            n_layers: 2
            placement: parallel
            norm: {kind: layernorm, bias: true}
            attention: {kind: mqa, n_heads: 4, position: rope}
            ffn: {kind: gelu, d_ff: 4 * d_model}
          logits: {block: lm_head, tie: embedding}
    """,
    {
        "embedding.tokens": "transformer.word_embeddings",
        "decoder.final_norm": "transformer.ln_f",
        **layers(
            "decoder",
            "transformer.h",
            {
                "input_norm": "input_layernorm",
                "attention.project.qkv": "self_attention.query_key_value",
                "attention.output": "self_attention.dense",
                "ffn.up": "mlp.dense_h_to_4h",
                "ffn.down": "mlp.dense_4h_to_h",
            },
        ),
    },
)

ALBERT = Family(
    "AlbertForMaskedLM",
    {
        "hidden_size": 32,
        "embedding_size": 12,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_hidden_groups": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "vocab_size": 61,
    },
    """
        extends: bert_base
        name: albert
        description: Six layers with the weights of two, and narrow tables
        d_model: 32
        vocab_size: 61
        max_len: 16
        graph:
          embedding: {d_embed: 12}
          encoder:
            n_layers: 6
            layers: {groups: 2}
            attention: {n_heads: 4}
            ffn: {d_ff: 48, approximate: tanh}
          logits:
            transform: {activation: {kind: gelu, approximate: tanh}}
            d_embed: 12
    """,
    {
        "embedding.tokens": "albert.embeddings.word_embeddings",
        "embedding.position.table": "albert.embeddings.position_embeddings",
        "embedding.tables.token_types": "albert.embeddings.token_type_embeddings",
        "embedding.norm": "albert.embeddings.LayerNorm",
        "embedding.project": "albert.encoder.embedding_hidden_mapping_in",
        "logits.dense": "predictions.dense",
        "logits.norm": "predictions.LayerNorm",
        "logits.output": "predictions",
        **layers(
            "encoder",
            "albert.encoder.albert_layer_groups",
            {
                "attention.project.qkv": tuple(
                    f"albert_layers.0.attention.{name}" for name in ("query", "key", "value")
                ),
                "attention.output": "albert_layers.0.attention.dense",
                "attention_norm_after": "albert_layers.0.attention.LayerNorm",
                "ffn.up": "albert_layers.0.ffn",
                "ffn.down": "albert_layers.0.ffn_output",
                "ffn_norm_after": "albert_layers.0.full_layer_layer_norm",
            },
        ),
    },
    kind="encoder",
    token_types=True,
)

MARIAN = Family(
    "MarianMTModel",
    {
        **BART_CONFIG,
        "activation_function": "swish",
        "scale_embedding": True,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    },
    """
        extends: vaswani_base
        name: marian
        description: The original transformer with all sines before all cosines, and SiLU
        graph:
          source_embedding: {position: {layout: half}}
          target_embedding: {position: {layout: half}}
          encoder: {attention: {bias: true}, ffn: {kind: silu, d_ff: 48}}
          decoder: {attention: {bias: true}, ffn: {kind: silu, d_ff: 48}}
    """,
    {"source_embedding.tokens": "model.shared", **BART_LAYERS},
    {"d_model": 32, "vocab_size": 61, **both("n_layers", 2), **both("attention.n_heads", 4)},
    kind="seq2seq",
    position_ids=False,
    counts_padding=True,
    ignored=("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"),
)

FURTHER = {
    "gpt_neox": GPT_NEOX,
    "phi": PHI,
    "falcon": FALCON,
    "albert": ALBERT,
    "marian": MARIAN,
}

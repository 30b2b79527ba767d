"""Shipped specs with an encoder, alone or with a decoder."""

from __future__ import annotations

from .family import Family, both, cross, layers, qkv
from .mapping import Source, WeightMap

T5_LAYERS = {
    **layers(
        "encoder",
        "encoder.block",
        {
            "attention_norm_in": "layer.0.layer_norm",
            "attention.project.qkv": qkv("layer.0.SelfAttention", "{}"),
            "attention.output": "layer.0.SelfAttention.o",
            "ffn_norm_in": "layer.1.layer_norm",
            "ffn.up": "layer.1.DenseReluDense.wi",
            "ffn.gate_up": ("layer.1.DenseReluDense.wi_0", "layer.1.DenseReluDense.wi_1"),
            "ffn.down": "layer.1.DenseReluDense.wo",
        },
    ),
    **layers(
        "decoder",
        "decoder.block",
        {
            "attention_norm_in": "layer.0.layer_norm",
            "attention.project.qkv": qkv("layer.0.SelfAttention", "{}"),
            "attention.output": "layer.0.SelfAttention.o",
            "cross_attention_norm_in": "layer.1.layer_norm",
            **cross("layer.1.EncDecAttention", "o", "{}"),
            "ffn_norm_in": "layer.2.layer_norm",
            "ffn.up": "layer.2.DenseReluDense.wi",
            "ffn.gate_up": ("layer.2.DenseReluDense.wi_0", "layer.2.DenseReluDense.wi_1"),
            "ffn.down": "layer.2.DenseReluDense.wo",
        },
    ),
}
T5_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias"
T5_WEIGHTS: WeightMap = {
    "source_embedding.tokens": "shared",
    "encoder.shared.base.position.buckets": f"encoder.{T5_BIAS}",
    "encoder.final_norm": "encoder.final_layer_norm",
    "decoder.shared.base.position.buckets": f"decoder.{T5_BIAS}",
    "decoder.final_norm": "decoder.final_layer_norm",
    "logits.output": "lm_head",
    **T5_LAYERS,
}
T5_CONFIG = {
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "vocab_size": 61,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
}
T5_SETS = {
    "d_model": 32,
    "vocab_size": 61,
    "encoder.n_layers": 2,
    "decoder.n_layers": 3,
    **both("attention.n_heads", 4),
    **both("attention.d_head", 6),
    **both("attention.position", "{kind: t5, n_buckets: 8, max_distance: 10}"),
    **both("ffn.d_ff", 48),
}
T5_V1_0 = Family(
    "T5ForConditionalGeneration",
    T5_CONFIG,
    "t5_small",
    T5_WEIGHTS,
    T5_SETS,
    kind="seq2seq",
    position_ids=False,
    length=19,
)
T5_V1_1 = Family(
    "T5ForConditionalGeneration",
    {**T5_CONFIG, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "t5_small",
    T5_WEIGHTS,
    {**T5_SETS, **both("ffn", "{kind: geglu, approximate: tanh, d_ff: 48}"), "logits": "{block: lm_head}"},
    kind="seq2seq",
    position_ids=False,
    untied_head=True,
    # Its scores are not scaled down: with larger weights, float32 itself is further than 1e-5 from float64.
    std=0.15,
    length=19,
)

BERT = Family(
    "BertForMaskedLM",
    {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "vocab_size": 61,
    },
    "bert_base",
    {
        "embedding.tokens": "bert.embeddings.word_embeddings",
        "embedding.position.table": "bert.embeddings.position_embeddings",
        "embedding.tables.token_types": "bert.embeddings.token_type_embeddings",
        "embedding.norm": "bert.embeddings.LayerNorm",
        "logits.dense": "cls.predictions.transform.dense",
        "logits.norm": "cls.predictions.transform.LayerNorm",
        "logits.output": "cls.predictions",
        **layers(
            "encoder",
            "bert.encoder.layer",
            {
                "attention.project.qkv": tuple(f"attention.self.{x}" for x in ("query", "key", "value")),
                "attention.output": "attention.output.dense",
                "attention_norm_after": "attention.output.LayerNorm",
                "ffn.up": "intermediate.dense",
                "ffn.down": "output.dense",
                "ffn_norm_after": "output.LayerNorm",
            },
        ),
    },
    {
        "d_model": 32,
        "vocab_size": 61,
        "max_len": 16,
        "encoder.n_layers": 2,
        "encoder.attention.n_heads": 4,
        "encoder.ffn.d_ff": 48,
    },
    kind="encoder",
    token_types=True,
)

BART_LAYER: dict[str, Source] = {
    "attention.project.qkv": qkv("self_attn"),
    "attention.output": "self_attn.out_proj",
    "attention_norm_after": "self_attn_layer_norm",
    "cross_attention_norm_after": "encoder_attn_layer_norm",
    **cross("encoder_attn", "out_proj"),
    "ffn.up": "fc1",
    "ffn.down": "fc2",
    "ffn_norm_after": "final_layer_norm",
}
BART_LAYERS: WeightMap = {
    **layers("encoder", "model.encoder.layers", BART_LAYER),
    **layers("decoder", "model.decoder.layers", BART_LAYER),
}
BART_CONFIG = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 16,
    "vocab_size": 61,
}
BART_SETS = {
    "d_model": 32,
    "vocab_size": 61,
    "max_len": 16,
    **both("n_layers", 2),
    **both("attention.n_heads", 4),
    **both("ffn.d_ff", 48),
}
BART = Family(
    "BartForConditionalGeneration",
    BART_CONFIG,
    "bart_base",
    {
        "source_embedding.tokens": "model.shared",
        "source_embedding.position.table": "model.encoder.embed_positions",
        "source_embedding.norm": "model.encoder.layernorm_embedding",
        "target_embedding.position.table": "model.decoder.embed_positions",
        "target_embedding.norm": "model.decoder.layernorm_embedding",
        **BART_LAYERS,
    },
    BART_SETS,
    kind="seq2seq",
    position_ids=False,
    counts_padding=True,
)

ENCODERS = {
    "t5_v1_0": T5_V1_0,
    "t5_v1_1": T5_V1_1,
    "bert_base": BERT,
    "bart_base": BART,
}

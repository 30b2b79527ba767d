"""Encoders with masked-LM heads, at small sizes, with every option of their families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .case import Case

BERT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
}
XLM = {"vocab_size": 61, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 24}
ANGLES = {"roformer.encoder.embed_positions.weight": "computed here"}
ENTITIES = {
    "entity_predictions.*": "its head",
    "luke.entity_embeddings.*": "its tables",
    "*2e_query.*": "queries of and for entities",
    "*e2w_query.*": "queries of and for entities",
    "luke.pooler.*": "not read by this head",
}
CONTACTS = {"esm.contact_head.*": "its head"}
NO_SHAPES = {"enable_shape": False, "enable_pronunciation": False}
SHAPES = {
    "roc_bert.embeddings.shape_embed.*": "not read",
    "roc_bert.embeddings.pronunciation_embed.*": "not read",
    "roc_bert.pooler.*": "not read by this head",
}
NO_PADDING = {"pad_token_id": None}  # theirs are far above so few tokens
COUNTS_PADDING = ("none", "right")
ROWS_ALONE = ("none", "left")
"""Their class counts padding: rows with padding in front are compared with the rows alone."""
NO_HEADS = {name: value for name, value in BERT.items() if name != "num_attention_heads"}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}


def masked(model_type: str, config: Mapping[str, Any], **more: Any) -> Case:
    """A case with a masked-LM head."""
    return Case(model_type, config, kind="masked", **more)


class NoCache:
    """Stands for the cache that an encoder does not need: theirs cannot be taken apart by layers."""

    def get_seq_length(self) -> int:
        return 0

    def __getitem__(self, layer: int) -> None:
        return None


def without_cache(model: Any) -> None:
    """Let their encoder with norms in front run, which asks a cache for its layers."""
    model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "cache": NoCache()}), with_kwargs=True
    )


ENCODERS: dict[str, Case] = {
    "bert": masked(
        "bert", BERT | {"type_vocab_size": 3, "hidden_act": "gelu_new"}, sides=COUNTS_PADDING, token_types=3
    ),
    "roberta": masked("roberta", BERT | {"hidden_act": "silu", "layer_norm_eps": 1e-5}, token_types=2),
    "xlm_roberta": masked("xlm-roberta", BERT | {"pad_token_id": 2, "type_vocab_size": 1}, token_types=1),
    "distilbert": masked(
        "distilbert",
        {
            "vocab_size": 61,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 24,
            "activation": "relu",
            "sinusoidal_pos_embds": True,
        },
        sides=COUNTS_PADDING,
    ),
    "electra": masked(
        "electra", BERT | {"embedding_size": 24, "hidden_act": "relu"}, sides=COUNTS_PADDING, token_types=2
    ),
    "electra_wide": masked("electra", BERT | {"embedding_size": 32}, sides=COUNTS_PADDING, token_types=2),
    "albert": masked(
        "albert",
        BERT | {"embedding_size": 24, "num_hidden_layers": 4, "num_hidden_groups": 2},
        sides=COUNTS_PADDING,
        token_types=2,
    ),
    "modernbert": masked(
        "modernbert",
        BERT
        | NO_PADDING
        | {
            "num_hidden_layers": 5,
            "local_attention": 5,
            "global_rope_theta": 1000.0,
            "local_rope_theta": 100.0,
        },
    ),
    "modernbert_biases": masked(
        "modernbert",
        BERT
        | NO_PADDING
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "local_attention": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
            "decoder_bias": False,
            "tie_word_embeddings": False,
            "hidden_activation": "silu",
            "classifier_activation": "relu",
        },
    ),
    "modernbert_decoder": Case(
        "modernbert-decoder",
        BERT
        | {
            "pad_token_id": 0,
            "num_hidden_layers": 5,
            "local_attention": 8,
            "global_rope_theta": 1000.0,
            "local_rope_theta": 100.0,
        },
        std=0.2,  # at 0.25 their own rounding is 1.6e-5
    ),
    "modernbert_decoder_biases": Case(
        "modernbert-decoder",
        BERT
        | {
            "pad_token_id": 0,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "local_attention": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
            "decoder_bias": False,
            "tie_word_embeddings": False,
            "hidden_activation": "silu",
            "classifier_activation": "relu",
        },
    ),
    "nomic_bert": masked("nomic_bert", BERT | {"head_dim": 12, "type_vocab_size": 3}, token_types=3),
    "mpnet": masked("mpnet", BERT, length=22),
    "camembert": masked("camembert", BERT, token_types=2),
    "data2vec_text": masked("data2vec-text", BERT, token_types=2),
    "xlm_roberta_xl": masked("xlm-roberta-xl", BERT | {"hidden_act": "relu"}, token_types=1),
    "roberta_prelayernorm": masked("roberta-prelayernorm", BERT, token_types=2),
    "ibert": masked("ibert", BERT, token_types=2, leaves_out=True),
    "ernie": masked("ernie", BERT, sides=COUNTS_PADDING, token_types=2),
    "ernie_tasks": masked(
        "ernie", BERT | {"use_task_id": True, "task_type_vocab_size": 5}, sides=("none",), token_types=2
    ),
    "megatron_bert": masked("megatron-bert", BERT, sides=COUNTS_PADDING, token_types=2),
    "rembert": masked(
        "rembert",
        BERT | {"input_embedding_size": 24, "output_embedding_size": 40},
        sides=COUNTS_PADDING,
        token_types=2,
    ),
    "roc_bert": masked(
        "roc_bert", BERT | NO_SHAPES, sides=COUNTS_PADDING, token_types=2, uncounted=SHAPES, leaves_out=True
    ),
    "roformer": masked("roformer", BERT | {"embedding_size": 24}, token_types=2, uncounted=ANGLES),
    "roformer_wide": masked("roformer", BERT, token_types=2, uncounted=ANGLES),
    "bert_generation": Case("bert-generation", BERT | {"is_decoder": True}, alone=True),
    "bert_generation_both_ways": Case("bert-generation", BERT, cached=False, alone=True),
    "xlm": masked("xlm", XLM, sides=COUNTS_PADDING),
    "xlm_causal": masked("xlm", XLM | {"causal": True}, sides=COUNTS_PADDING),
    "flaubert": masked("flaubert", XLM | {"gelu_activation": False}, sides=COUNTS_PADDING),
    "flaubert_pre_norm": masked("flaubert", XLM | {"pre_norm": True}, sides=COUNTS_PADDING, repair=without_cache),
    "luke": masked(
        "luke",
        BERT | {"entity_vocab_size": 10, "entity_emb_size": 16},
        token_types=2,
        uncounted=ENTITIES,
        leaves_out=True,
    ),
    "gte": masked("gte", BERT | {"hidden_act": "silu"}, token_types=1),
    "jina_embeddings_v3": masked("jina_embeddings_v3", BERT, token_types=1),
    "ultrabert": masked(
        "ultrabert",
        NO_PADDING
        | {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "max_position_embeddings": 64,
            "prediction_head_size": 20,
            "sliding_window": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "eurobert": masked(
        "eurobert",
        BERT
        | NO_PADDING
        | {
            "num_key_value_heads": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "eurobert_tied": masked(
        "eurobert",
        BERT | NO_PADDING | {"head_dim": 12, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    "esm": masked(
        "esm", BERT | {"pad_token_id": 1, "emb_layer_norm_before": True}, leaves_out=True, uncounted=CONTACTS
    ),
    "esm_rotary": masked(
        "esm",
        BERT
        | {
            "pad_token_id": 1,
            "position_embedding_type": "rotary",
            "rope_theta": 1000.0,
            "max_position_embeddings": 32,
            "tie_word_embeddings": False,
        },
        leaves_out=True,
        uncounted=CONTACTS,
    ),
    "esmc": masked("esmc", BERT | {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3}),
    # The input has near distances, logarithmic distances and distances that are clipped, beyond 9.
    "deberta_v3": masked(
        "deberta-v2",
        BERT
        | DISENTANGLED
        | {
            "position_buckets": 4,
            "max_relative_positions": 9,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
        },
    ),
    "deberta_v2_separate": masked(
        "deberta-v2",
        BERT
        | DISENTANGLED
        | {"position_biased_input": True, "max_relative_positions": 5, "type_vocab_size": 3, "pos_att_type": "p2c"},
        sides=COUNTS_PADDING,
        token_types=3,
    ),
    "deberta": masked(
        "deberta",
        BERT | DISENTANGLED | {"max_relative_positions": 4, "type_vocab_size": 2},
        sides=COUNTS_PADDING,
        token_types=2,
    ),
    "deberta_c2p": masked(
        "deberta",
        BERT | DISENTANGLED | {"pos_att_type": ["c2p"], "tie_word_embeddings": False},
        uncounted={"cls.predictions.bias": "the class ignores it if the head is not tied"},
        leaves_out=None,
    ),
    "fnet": masked(
        "fnet",
        NO_HEADS | {"type_vocab_size": 3, "hidden_act": "relu"},
        sides=ROWS_ALONE,
        alone=True,
        token_types=3,
        uncounted={"fnet.pooler.*": "not read by this head"},
        leaves_out=True,
    ),
    "convbert": masked(
        "convbert",
        BERT | {"embedding_size": 24, "conv_kernel_size": 5, "num_groups": 2, "hidden_act": "relu"},
        sides=ROWS_ALONE,
        alone=True,
        token_types=2,
    ),
    "convbert_plain": masked(
        "convbert",
        BERT | {"embedding_size": 32, "head_ratio": 3, "conv_kernel_size": 3, "tie_word_embeddings": False},
        sides=ROWS_ALONE,
        alone=True,
        token_types=2,
        leaves_out=None,
    ),
}

"""Random valid configs: several fields of a case changed together, with unpublished sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import transformers

from .case import Case
from .changed_fields import NOT_THE_MODEL, quiet, runnable

HIDDEN = ("hidden_size", "d_model", "n_embd")
HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
GROUPS = ("num_key_value_heads", "num_kv_heads")
LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
ACTIVATION = ("hidden_act", "hidden_activation", "activation_function", "activation", "dense_act_fn")
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "silu", "tanh")
ROTARY: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 77.0},
    {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 6},
    {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 6,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
    },
)
VALUES: Mapping[str, tuple[Any, ...]] = {
    "vocab_size": (37, 53, 97),
    "max_position_embeddings": (19, 33, 50),
    "sliding_window": (1, 3, 5, 30),
    "head_dim": (4, 6, 10, 14),
    "d_kv": (3, 7, 12),
    "partial_rotary_factor": (0.25, 0.5, 0.75, 1.0),
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "n_inner", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"),
        (17, 35, 50),
    ),
    **dict.fromkeys(LAYERS, (1, 3, 5)),
    **dict.fromkeys(ACTIVATION, ACTIVATIONS),
}
"""Legal values of sizes and words, by the names of their fields."""
FIXED = NOT_THE_MODEL | {
    "pad_token_id",
    "is_decoder",
    "type_vocab_size",
    "add_cross_attention",
    *HIDDEN,
    *HEADS,
    *GROUPS,
}
FIXED |= {"is_gated_act", "dense_act_fn", "alibi", "scale_decoder_outputs"}
"""Fields that the tests depend on, those that `sizes` draws together, those that repeat `feed_forward_proj`, and ALiBi,
which the class of Falcon adds twice."""


def drawn(case: Case, seed: str) -> tuple[Case, dict[str, Any]]:
    """Return a case with 4 to 9 fields changed that transformers runs, and the changes."""
    random = Random(seed)
    base = deepcopy(dict(case.config))
    fields = _fields(case)
    options = [(field, value) for field, value in _options(fields, random)]
    random.shuffle(options)
    changed: dict[str, Any] = {}
    for change in [sizes(fields, random), *({field: value} for field, value in options)]:
        trial = replace(case, config={**base, **_of_layers(base, {**changed, **change}, random)})
        if len(changed) < 9 and _runs(trial):
            changed |= change
    changed = _of_layers(base, changed, random)
    return replace(case, config={**base, **changed}, std=0.6 * case.std), changed


def sizes(fields: Mapping[str, Any], random: Random) -> dict[str, int]:
    """Return widths and heads that fit together."""
    heads = random.choice((1, 2, 3, 6))
    groups = random.choice([number for number in (1, 2, 3, 6) if heads % number == 0])
    changed = dict.fromkeys([name for name in HIDDEN if name in fields], random.choice((12, 36, 60)))
    changed |= dict.fromkeys([name for name in HEADS if name in fields], heads)
    return changed | dict.fromkeys([name for name in GROUPS if fields.get(name) is not None], groups)


def _fields(case: Case) -> dict[str, Any]:
    """Return all fields of a case, as its class has them."""
    fields = transformers.AutoConfig.for_model(case.model_type, **deepcopy(dict(case.config))).to_dict()
    return {name: value for name, value in fields.items() if name not in NOT_THE_MODEL}


def _options(fields: Mapping[str, Any], random: Random) -> Iterator[tuple[str, Any]]:
    """Yield another value of each field that has values to choose from."""
    # T5's class ties all models that it creates; its published files with a head were untied otherwise.
    fixed = FIXED | ({"tie_word_embeddings"} if "scale_decoder_outputs" in fields else set())
    for field, value in fields.items():
        if field in fixed:
            continue
        if field in VALUES and (value is not None or field == "n_inner"):
            yield field, random.choice(VALUES[field])
        elif field == "rope_parameters" and isinstance(value, dict) and "rope_theta" in value:
            share = {"partial_rotary_factor": random.choice((0.25, 0.5, 1.0))}
            yield field, random.choice(ROTARY) | (share if "partial_rotary_factor" in value else {})
        elif isinstance(value, bool):
            yield field, not value
        elif isinstance(value, float) and value > 0:
            yield field, value * random.choice((0.5, 1.5))


def _of_layers(base: Mapping[str, Any], changed: dict[str, Any], random: Random) -> dict[str, Any]:
    """Return changes in which the list of layer types has an entry for each layer."""
    count = next((changed[name] for name in LAYERS if name in changed), None)
    kinds = base.get("layer_types")
    if count is None or not kinds or len(changed.get("layer_types", ())) == count:
        return changed
    return {**changed, "layer_types": [random.choice(kinds) for _ in range(count)]}


def _runs(case: Case) -> bool:
    """Return True if transformers runs the model of a config."""
    try:
        with quiet():
            runnable(case)
    except Exception:  # transformers reports in many ways that it cannot
        return False
    return True

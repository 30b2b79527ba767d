"""Arguments of generation in transformers, each with the corresponding argument in tfkit, or a note on its absence.

Names of `GenerationConfig` and `generate` in https://huggingface.co/docs/transformers/main_classes/text_generation.
"""

from __future__ import annotations

from collections.abc import Collection

from tfkit.arguments import unknown_argument

_BEAMS = "there is no beam search: use temperature 0 for the most likely token, or draw several samples (n_samples)"
_LOGITS = "`generate` neither changes nor returns the logits: write a loop that calls a `tfkit.CachedModel`"
_ATTENTION = "`tfkit.attention_weights` gives the attention weights"
_START = "the decoder's first tokens are the prompt: `tokens`"

FOREIGN = {
    "input_ids": "the prompts are `tokens`",
    "inputs": "the prompts are `tokens`",
    "inputs_embeds": "prompts are token ids: `tokens`",
    "decoder_input_ids": "the prompts are `tokens`; in an encoder-decoder, the tokens of the decoder",
    "attention_mask": "the padding mask is `mask`; for a different input NAME, `NAME_mask`",
    "decoder_start_token_id": _START,
    "bos_token_id": _START,
    "max_length": "`max_new_tokens` counts the new tokens, `length` the tokens of prompt and answer",
    "min_length": _LOGITS,
    "min_new_tokens": _LOGITS,
    "do_sample": "a `temperature` above 0 draws tokens, 0 takes the most likely token",
    "num_return_sequences": "`n_samples` is the number of rows for each prompt",
    "eos_token_id": "`stop` has the token ids that end a row: stop=[ID]",
    "stop_strings": "`stop` has token ids or sequences of them: pass the tokens of the text",
    "stopping_criteria": "`stop` has token ids, and `on_token` may return the rows to end",
    "pad_token_id": "the padding token is `pad`",
    "streamer": "`on_token` is called with the tokens of each step",
    "use_cache": "there is always a cache",
    **dict.fromkeys(("past_key_values", "cache"), "a `tfkit.CachedModel` continues its sequences"),
    "max_time": "`on_token` may return the rows to end",
    "num_beams": _BEAMS,
    "num_beam_groups": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "diversity_penalty": _BEAMS,
    "penalty_alpha": "there is no contrastive search",
    "min_p": "there is no min_p: `top_p` or `top_k` exclude unlikely tokens",
    "typical_p": "there is no typical sampling: `top_p` or `top_k` exclude unlikely tokens",
    "epsilon_cutoff": "there is no cutoff: `top_p` or `top_k` exclude unlikely tokens",
    "eta_cutoff": "there is no cutoff: `top_p` or `top_k` exclude unlikely tokens",
    "no_repeat_ngram_size": "repeated n-grams cannot be excluded: `repetition_penalty` makes repetitions less likely",
    "bad_words_ids": _LOGITS,
    "suppress_tokens": _LOGITS,
    "forced_bos_token_id": _START,
    "forced_eos_token_id": _LOGITS,
    "logits_processor": _LOGITS,
    "prefix_allowed_tokens_fn": _LOGITS,
    "output_scores": _LOGITS,
    "output_logits": _LOGITS,
    "output_attentions": _ATTENTION,
    "assistant_model": "there is no speculative decoding",
    "generation_config": "pass its settings by name, such as `temperature`",
}


def no_argument(name: str, names: Collection[str]) -> TypeError:
    """Return the error for an unknown argument of `generate`, with the argument to use instead."""
    if name in FOREIGN:
        return TypeError(f"`generate` has no argument `{name}`: {FOREIGN[name]}")
    return TypeError(unknown_argument("generate", name, names))

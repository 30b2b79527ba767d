"""Arguments of generation by their names in transformers, each with its name here, or a note that there is none.

Names of `GenerationConfig` and `generate` in https://huggingface.co/docs/transformers/main_classes/text_generation.
"""

from __future__ import annotations

from collections.abc import Collection

from tfkit.arguments import unknown_argument

_BEAMS = "there is no beam search: take the likeliest token (temperature 0), or draw several samples (n_samples)"
_LOGITS = "nothing changes or returns the logits: call a `tfkit.CachedModel` in a loop of your own"
_ATTENTION = "`tfkit.attention_weights` gives the attention weights"
_START = "the decoder's first tokens are the prompt: `tokens`"

FOREIGN = {
    "input_ids": "the prompts are `tokens`",
    "inputs": "the prompts are `tokens`",
    "inputs_embeds": "prompts are token ids: `tokens`",
    "decoder_input_ids": "the prompts are `tokens`: of an encoder-decoder, those of the decoder",
    "attention_mask": "the padding mask is `mask`; that of another input NAME is `NAME_mask`",
    "decoder_start_token_id": _START,
    "bos_token_id": _START,
    "max_length": "`max_new_tokens` counts the new tokens, `length` those of prompt and answer",
    "min_length": _LOGITS,
    "min_new_tokens": _LOGITS,
    "do_sample": "a `temperature` above 0 draws tokens, 0 takes the likeliest",
    "num_return_sequences": "`n_samples` says how many rows each prompt gets",
    "eos_token_id": "`stop` has the token ids that end a row: stop=[ID]",
    "stop_strings": "`stop` has token ids or sequences of them: give it the tokens of the text",
    "stopping_criteria": "`stop` has token ids, and `on_token` may return the rows that shall end",
    "pad_token_id": "the token that fills places is `pad`",
    "streamer": "`on_token` is called with the tokens of each step",
    "use_cache": "there always is a cache",
    "past_key_values": "a `tfkit.CachedModel` goes on from what it has read",
    "max_time": "`on_token` may return the rows that shall end",
    "num_beams": _BEAMS,
    "num_beam_groups": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "diversity_penalty": _BEAMS,
    "penalty_alpha": "there is no contrastive search",
    "min_p": "there is no min_p: `top_p` or `top_k` leave out unlikely tokens",
    "typical_p": "there is no typical sampling: `top_p` or `top_k` leave out unlikely tokens",
    "epsilon_cutoff": "there is no cutoff: `top_p` or `top_k` leave out unlikely tokens",
    "eta_cutoff": "there is no cutoff: `top_p` or `top_k` leave out unlikely tokens",
    "no_repeat_ngram_size": "n-grams are not forbidden: `repetition_penalty` makes repetitions less likely",
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
    "generation_config": "give its settings by name, such as `temperature`",
}


def no_argument(name: str, names: Collection[str]) -> TypeError:
    """Return the error for an unknown argument of `generate`, with the argument that was probably meant."""
    if name in FOREIGN:
        return TypeError(f"`generate` has no argument `{name}`: {FOREIGN[name]}")
    return TypeError(unknown_argument("generate", name, names))

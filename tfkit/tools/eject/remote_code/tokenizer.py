"""Tokenizer files for AutoTokenizer, and the special tokens for generation."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tfkit.decoding.text import CharacterTokenizer, FileTokenizer, load_tokenizer
from tfkit.spec.folder import MAX_CONFIG, TOKENIZERS
from tfkit.spec.header import read_object

FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")
"""Names of the end-of-text token, for tokenizers whose settings do not name it."""
ROLES = ("bos_token", "eos_token", "pad_token")


def complete_tokenizer(folder: Path, files: Collection[str], max_len: int | None) -> dict[str, int]:
    """Add the files that AutoTokenizer needs to a folder, and return the ids of special tokens for the config.

    Args:
        folder: the folder, with the files of a tokenizer.
        files: their names. If tfkit cannot read any of them, nothing is added.
        max_len: the longest sequence of the model.
    """
    name = next((name for name in TOKENIZERS if name in files), None)
    if name is None:
        return {}
    tokenizer = load_tokenizer(folder / name, name)  # the folder has a temporary name
    if isinstance(tokenizer, CharacterTokenizer):
        _write_characters(tokenizer, folder / FILE)
        tokenizer = load_tokenizer(folder / FILE)
    assert isinstance(tokenizer, FileTokenizer)
    if SETTINGS in files:
        settings: dict[str, Any] = read_object(folder / SETTINGS, max_bytes=MAX_CONFIG)
    else:
        end = next((text for text in ENDS if tokenizer.special(text) is not None), None)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        # Without a `pad_token`: collators would hide the end of each text from the loss if it were the same token.
        settings |= {} if end is None else {"eos_token": end}
        settings |= {} if max_len is None else {"model_max_length": max_len}
        (folder / SETTINGS).write_text(f"{json.dumps(settings, indent=2)}\n", encoding="utf-8")
    tokens = {role: settings.get(role) for role in ROLES}
    texts = {role: token.get("content") if isinstance(token, dict) else token for role, token in tokens.items()}
    ids = {f"{role}_id": tokenizer.special(text) for role, text in texts.items() if isinstance(text, str)}
    return {name: index for name, index in ids.items() if index is not None}


def _write_characters(tokenizer: CharacterTokenizer, path: Path) -> None:
    """Write a character tokenizer as a tokenizer.json."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = {character: index for index, character in enumerate(tokenizer.characters)}
    file = Tokenizer(models.WordLevel(vocab=ids, unk_token=tokenizer.characters[0]))
    file.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    file.decoder = decoders.Fuse()
    file.save(str(path))

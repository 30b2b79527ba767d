"""The files of a tokenizer, which belong with the weights that were trained with it."""

from __future__ import annotations

import os
from pathlib import Path

OURS = ("tokenizer.json", "chars.json")
"""The files that tfkit reads, in this order."""
NAMES = frozenset(
    {
        *OURS,
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "vocab-src.json",
        "vocab-tgt.json",
        "target_vocab.json",
        "entity_vocab.json",
        "emoji.json",
        "normalizer.json",
        "bpe.codes",
        "dict.txt",
        "prophetnet.tokenizer",
        "sentencepiece.model",
        "spm.model",
        "tokenizer.model",
        "tekken.json",
        "spiece.model",
        "sentencepiece.bpe.model",
        "source.spm",
        "target.spm",
    }
)
"""The names in transformers: https://huggingface.co/docs/transformers/main_classes/tokenizer, and the
`vocab_files_names` of its tokenizers."""


def tokenizer_files(weights: Path | None) -> list[Path]:
    """Return the files of a tokenizer next to weights, which are a file or a folder; empty if there are no weights."""
    if weights is None:
        return []
    folder = weights if os.path.isdir(weights) else weights.parent
    return sorted(folder / name for name in NAMES if os.path.isfile(folder / name))

"""Byte-level BPE from texts, by the library `tokenizers`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.spec.source import contents


def read_texts(files: Sequence[Path]) -> list[str]:
    """Read the texts of files; raise SpecError if a file cannot be read, or all are empty."""
    texts = list(map(_read, files))
    if not any(texts):
        raise SpecError(Diagnostic("there is nothing to learn from: the text is empty"))
    return texts


def _read(path: Path) -> str:
    try:
        return contents(path).decode()
    except OSError as error:
        raise SpecError(Diagnostic(f"cannot read {quoted(str(path))}: {error.strerror}")) from error
    except UnicodeDecodeError as error:
        raise SpecError(Diagnostic(f"{quoted(str(path))} is not UTF-8: byte {error.start:,}")) from error


def train(texts: Sequence[str], *, vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
    """Train a tokenizer of at most `vocab_size` tokens: special tokens, 256 bytes, and frequent pairs of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer

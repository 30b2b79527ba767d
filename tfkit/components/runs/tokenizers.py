"""Text to ids: characters, bytes, or a trained tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

import tfkit
from tfkit.component import Data, Immaterial, Tokenizer, TokenizerConfig
from tfkit.components.runs.text import shown
from tfkit.errors import Invalid, SpecError, quoted


class CharactersConfig(TokenizerConfig):
    """One token for each character of the data, numbered in the order of Unicode."""

    kind: Literal["characters"] = "characters"

    def build(self, text: str) -> Tokenizer:
        return tfkit.CharacterTokenizer.of_text(text)


class BytesConfig(TokenizerConfig):
    """One token for each byte of UTF-8: 256 tokens, for any text."""

    kind: Literal["bytes"] = "bytes"

    def build(self, text: str) -> Tokenizer:
        return tfkit.ByteTokenizer()


class FileConfig(TokenizerConfig):
    """A `tokenizer.json` in the format of Hugging Face's `tokenizers`, as `tfkit tokenizer` writes it."""

    kind: Literal["file"] = "file"

    path: Immaterial[str]
    """The path of the file."""

    def located(self, folder: Path) -> Self:
        return self.model_copy(update={"path": str((folder / self.path).absolute())})

    def build(self, text: str) -> Tokenizer:
        try:
            return tfkit.FileTokenizer.read(Path(shown(self.path)))
        except SpecError as error:
            raise Invalid("path", error.diagnostics[0].message, help="train one: tfkit tokenizer") from error


def id_of(text: str, data: Data, field: str) -> int:
    """Return the id of a text that is one token; raise `Invalid` about a field if it is not."""
    try:
        ids = [] if data.tokenizer is None else data.tokenizer.encode(text)
    except ValueError:
        ids = []
    if len(ids) != 1:
        raise Invalid(field, f"{quoted(text)} is not a token of the data")
    return ids[0]

"""Text to ids: characters or bytes."""

from __future__ import annotations

from typing import Literal

import tfkit
from tfkit.component import Tokenizer, TokenizerConfig


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

"""Text to tokens and back, and back again while the tokens still come."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tfkit.errors import Diagnostic, SpecError, listing, quoted

if TYPE_CHECKING:
    import tokenizers

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""What bytes become that are no character, such as the first half of one."""
CONTEXT = 32
"""Tokens in front of a new one that its text may depend on."""
CHARACTERS = "characters"


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int
    """One more than the largest id."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that its kind of model expects around it."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens have none."""

    def special(self, text: str) -> int | None:
        """The id of the special token that is written so, such as `<|endoftext|>`; None where there is none."""


class CharacterTokenizer:
    """One token for each character, numbered in the order in which they are given.

    Raises ValueError for a character that stands there twice, or none at all.
    """

    def __init__(self, characters: str) -> None:
        if not characters or len(set(characters)) < len(characters):
            raise ValueError("characters must be one or more, each of them once")
        self.characters = characters
        self.vocab_size = len(characters)
        self._ids = {character: index for index, character in enumerate(characters)}

    @classmethod
    def of_text(cls, text: str) -> CharacterTokenizer:
        """The characters of a text, sorted."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> list[int]:
        """The ids of a text; raises ValueError for characters that are not in the vocabulary."""
        unknown = [character for character in dict.fromkeys(text) if character not in self._ids]
        if unknown:
            names = listing(map(quoted, unknown))
            raise ValueError(f"not among the {self.vocab_size} characters of the tokenizer: {names}")
        return [self._ids[character] for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; those beyond the vocabulary become the sign for unknown characters."""
        return "".join(self.characters[one] if 0 <= one < self.vocab_size else UNKNOWN for one in ids)

    def special(self, text: str) -> int | None:
        """There are no special tokens."""
        return None

    def save(self, path: Path) -> None:
        """Write the characters to a JSON file that `load_tokenizer` reads."""
        path.write_text(json.dumps({CHARACTERS: self.characters}, ensure_ascii=False) + "\n", encoding="utf-8")


class FileTokenizer:
    """What a `tokenizer.json` says, in the form of Hugging Face's `tokenizers`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()  # a prompt is read whole, whatever the training did
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special = {
            one.content: index for index, one in tokenizer.get_added_tokens_decoder().items() if one.special
        }
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def special(self, text: str) -> int | None:
        return self._special.get(text)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a file: a `tokenizer.json`, or what `CharacterTokenizer.save` wrote.

    A file of another name is a text whose characters are the tokens. Raises SpecError for a file that is none of them.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else {CHARACTERS: "".join(sorted(set(text)))}
        return _tokenizer(text, data)
    except OSError as error:
        cause = error.strerror or str(error)
    except UnicodeDecodeError:
        cause = "it is not UTF-8"
    except json.JSONDecodeError as error:
        cause = f"no JSON: {error}"
    except Exception as error:  # the library raises nothing narrower
        cause = " ".join(str(error).split())
    raise SpecError(Diagnostic(f"cannot read the tokenizer {quoted(str(path))}: {cause}"))


def _tokenizer(text: str, data: Any) -> Tokenizer:
    if isinstance(data, dict) and isinstance(data.get(CHARACTERS), str):
        return CharacterTokenizer(data[CHARACTERS])
    import tokenizers

    return FileTokenizer(tokenizers.Tokenizer.from_str(text))


class TextStream:
    """The text of tokens as they come, never less than whole characters, up to a stop text.

    What was given out is what the tokenizer makes of all tokens at once. So it keeps back the end of the text while it
    is half a character, or may be the beginning of a stop text.

    Args:
        tokenizer: whose tokens they are.
        stop: texts that end it; they and what follows are not given out.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._decoded = ""  # of `_ids`, the part that will not change
        self._held = ""  # decoded, and perhaps the beginning of a stop text

    def feed(self, token: int) -> str:
        """Take in a token; the text that is certain now."""
        if self.stopped:
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(UNKNOWN):
            return ""
        new = text[len(self._decoded) :]
        self._decoded = text
        if len(self._ids) > 2 * CONTEXT:
            del self._ids[:-CONTEXT]
            self._decoded = self._tokenizer.decode(self._ids)
        return self._until_stop(new)

    def finish(self) -> str:
        """The text that was kept back, when no token follows."""
        if self.stopped:
            return ""
        rest = self._until_stop(self._tokenizer.decode(self._ids)[len(self._decoded) :]) + self._held
        self._held, self._ids, self._decoded = "", [], ""
        return rest

    def _until_stop(self, new: str) -> str:
        text = self._held + new
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text with which `stop` begins."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)


class Texts:
    """The texts of all rows while their tokens come; something to give to `generate` as `on_token`.

    Args:
        tokenizer: whose tokens they are.
        rows: how many rows there are.
        stop: texts that end a row.
        changed: called after each step.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rows: int,
        stop: Sequence[str],
        changed: Callable[[Texts], None] = lambda texts: None,
    ) -> None:
        self.texts = [""] * rows
        self.complete = [False] * rows
        self._streams = [TextStream(tokenizer, stop) for _ in range(rows)]
        self._changed = changed

    def __call__(self, tokens: Sequence[int | None]) -> list[int]:
        """Take in the token of each row, None for those that have ended; the rows that end at a stop text."""
        for row, token in enumerate(tokens):
            if token is None:
                self._complete(row)
            else:
                self.texts[row] += self._streams[row].feed(token)
                self.complete[row] |= self._streams[row].stopped
        self._changed(self)
        return [row for row, stream in enumerate(self._streams) if stream.stopped]

    def finish(self) -> list[str]:
        """All texts, when no token follows."""
        for row in range(len(self.texts)):
            self._complete(row)
        self._changed(self)
        return self.texts

    def _complete(self, row: int) -> None:
        if not self.complete[row]:
            self.texts[row] += self._streams[row].finish()
            self.complete[row] = True


class NumberTokenizer:
    """Token ids as they are, for models without a tokenizer: the text of 5 and 7 is `5, 7`."""

    vocab_size = 0

    def encode(self, text: str) -> list[int]:
        """The ids of a text; raises ValueError for anything else than numbers between commas."""
        return [self._number(one.strip()) for one in text.split(",")] if text.strip() else []

    def decode(self, ids: Sequence[int]) -> str:
        return ", ".join(map(str, ids))

    def special(self, text: str) -> int | None:
        return self._number(text.strip())

    def _number(self, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ValueError(f"{quoted(text)} is no token id: they are whole numbers, as in `5,7`")
        return int(text)

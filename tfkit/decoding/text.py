"""Tokenizers, and decoding of text while its tokens are being generated."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.spec.source import file_bytes

if TYPE_CHECKING:
    import tokenizers

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Replacement character for invalid bytes, such as the first half of a character."""
CONTEXT = 32
"""Number of earlier tokens on which the text of a new token may depend."""
CHARACTERS = "characters"


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int
    """One more than the largest id."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the model expects around it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; special tokens have no text."""

    def special(self, text: str) -> int | None:
        """Return the id of the special token with a text, such as `<|endoftext|>`; None if there is none."""


class CharacterTokenizer:
    """One token for each character, numbered in the given order.

    Raises ValueError if a character is given twice, or none at all.
    """

    file = "chars.json"

    def __init__(self, characters: str) -> None:
        if not characters or len(set(characters)) < len(characters):
            raise ValueError("characters must not be empty or repeat")
        self.characters = characters
        self.vocab_size: int = len(characters)
        self._ids = {character: index for index, character in enumerate(characters)}

    @classmethod
    def of_text(cls, text: str) -> CharacterTokenizer:
        """Build the tokenizer of the sorted characters of a text."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; raise ValueError for characters outside the vocabulary."""
        unknown = [character for character in dict.fromkeys(text) if character not in self._ids]
        if unknown:
            names = listing(map(quoted, unknown))
            raise ValueError(f"not among the {self.vocab_size} characters of the tokenizer: {names}")
        return [self._ids[character] for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Ids outside the vocabulary become the replacement character."""
        return "".join(self.characters[index] if 0 <= index < self.vocab_size else REPLACEMENT for index in ids)

    def special(self, text: str) -> int | None:
        """Return None: there are no special tokens."""
        return None

    def byte_counts(self) -> list[int]:
        """Return the number of UTF-8 bytes of each id."""
        return [len(character.encode()) for character in self.characters]

    def pieces(self) -> list[bytes]:
        """Return the text of each id in UTF-8."""
        return [character.encode() for character in self.characters]

    def save(self, path: Path) -> None:
        """Write the characters to a JSON file that `load_tokenizer` reads."""
        path.write_text(json.dumps({CHARACTERS: self.characters}, ensure_ascii=False) + "\n", encoding="utf-8")


class ByteTokenizer:
    """One token for each of the 256 bytes, for any text in UTF-8."""

    file = "tokenizer.json"
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Ids outside the vocabulary become the replacement character."""
        return b"".join(bytes([i]) if i < self.vocab_size else REPLACEMENT.encode() for i in ids).decode(
            errors="replace"
        )

    def special(self, text: str) -> int | None:
        """Return None: there are no special tokens."""
        return None

    def byte_counts(self) -> list[int]:
        """Return the number of bytes of each id, which is 1."""
        return [1] * self.vocab_size

    def pieces(self) -> list[bytes]:
        """Return the byte of each id."""
        return [bytes([index]) for index in range(self.vocab_size)]

    def save(self, path: Path) -> None:
        """Write an equivalent `tokenizer.json`."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        tokenizer = Tokenizer(models.BPE(vocab=_byte_alphabet(), merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(path))


def _byte_alphabet() -> dict[str, int]:
    """Map each printable character to the byte for which it stands in the format of `tokenizers`."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(unprintable)}


class FileTokenizer:
    """The tokenizer of a `tokenizer.json`, in the format of Hugging Face's `tokenizers`.

    `folder` has the further files of the tokenizer, such as its settings and its chat template.
    """

    file = "tokenizer.json"

    def __init__(self, tokenizer: tokenizers.Tokenizer, name: str = file, folder: Path | None = None) -> None:
        self._name = name  # in errors
        self.folder = folder
        tokenizer.no_truncation()  # a prompt must not be truncated, even if texts were in training
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special = {
            token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def read(cls, path: Path) -> FileTokenizer:
        """Read the tokenizer of a file; raise SpecError if the file is not a tokenizer."""
        tokenizer = load_tokenizer(path)
        if not isinstance(tokenizer, FileTokenizer):
            raise SpecError(Diagnostic(f"{quoted(str(path))} is not a tokenizer.json"))
        return tokenizer

    def encode(self, text: str) -> list[int]:
        with self._checked("encode a text"):
            return list(self._tokenizer.encode(text).ids)

    def encode_bare(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        with self._checked("encode a text"):
            return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        with self._checked("decode ids"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    @contextmanager
    def _checked(self, task: str) -> Iterator[None]:
        """Turn an exception of the library into an error that names the file."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no `Exception`
            message = f"the tokenizer {quoted(self._name)} cannot {task}: {_cause_text(error)}"
            raise SpecError(Diagnostic(message, help="correct the file, or use a different tokenizer")) from error

    def special(self, text: str) -> int | None:
        return self._special.get(text)

    def byte_counts(self) -> list[int]:
        """Return the number of bytes of each id, 0 for a special token.

        Raises ValueError if the tokens are not bytes in the alphabet of `ByteLevel`, because decoding might then not
        restore the text.
        """
        if not self._has_bytes:
            raise ValueError("its tokens are not bytes: it is not a byte-level tokenizer")
        tokens = {index: len(text) for text, index in self._tokenizer.get_vocab(with_added_tokens=False).items()}
        added = {
            index: len(token.content.encode()) for index, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        special = dict.fromkeys(self._special.values(), 0)
        counts = tokens | added | special
        return [counts.get(index, 0) for index in range(self.vocab_size)]

    def pieces(self) -> list[bytes | None]:
        """Return the text of each id in UTF-8, its bytes if the tokens are bytes; None for an id without a token."""
        alphabet = _byte_alphabet() if self._has_bytes else {}
        added = self._tokenizer.get_added_tokens_decoder()

        def bytes_of(text: str, index: int) -> bytes:
            is_plain = index not in added and all(character in alphabet for character in text)
            return bytes(alphabet[character] for character in text) if is_plain else text.encode()

        texts = map(self._tokenizer.id_to_token, range(self.vocab_size))
        return [None if text is None else bytes_of(text, index) for index, text in enumerate(texts)]

    @property
    def _has_bytes(self) -> bool:
        decoder = json.loads(self._tokenizer.to_str())["decoder"]
        return decoder is not None and decoder["type"] == "ByteLevel"

    def save(self, path: Path) -> None:
        """Write the file."""
        self._tokenizer.save(str(path))


def load_tokenizer(path: Path, name: str | None = None) -> Tokenizer:
    """Read a `tokenizer.json`, or a file that `CharacterTokenizer.save` wrote.

    Any other name is a text file, whose characters become the tokens. Raises SpecError for a file of neither format;
    errors show `name`, by default the path.
    """
    name = name or str(path)
    try:
        text = file_bytes(path).decode()
        data = json.loads(text) if path.suffix == ".json" else {CHARACTERS: "".join(sorted(set(text)))}
        return _tokenizer_from_text(text, data, name)
    except (KeyboardInterrupt, SystemExit):
        raise
    except OSError as error:
        cause = error.strerror or str(error)
    except UnicodeDecodeError:
        cause = "it is not UTF-8"
    except json.JSONDecodeError as error:
        cause = f"not JSON: {error}"
    except BaseException as error:  # the library raises plain `Exception`, and panics, which are no `Exception`
        cause = _cause_text(error)
    raise SpecError(Diagnostic(f"cannot read the tokenizer {quoted(name)}: {cause}"))


def _cause_text(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _tokenizer_from_text(text: str, data: Any, name: str) -> Tokenizer:
    if isinstance(data, dict) and isinstance(data.get(CHARACTERS), str):
        return CharacterTokenizer(data[CHARACTERS])
    import tokenizers

    return FileTokenizer(tokenizers.Tokenizer.from_str(text), name)


class TextStream:
    """Decodes tokens as they are generated, in complete characters, up to a `stop` text, which is not returned.

    The returned text in total equals the decoded text of all tokens. The end of the text is therefore held back while
    it is an incomplete character or may be the beginning of a stop text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._decoded = ""  # the part of the text of `_ids` that will not change
        self._held = ""  # decoded text that may be the beginning of a stop text

    def feed(self, token: int) -> str:
        """Add a token; return the text that later tokens cannot change."""
        if self.stopped:
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(REPLACEMENT):
            return ""
        new = text[len(self._decoded) :]
        self._decoded = text
        if len(self._ids) > 2 * CONTEXT:
            del self._ids[:-CONTEXT]
            self._decoded = self._tokenizer.decode(self._ids)
        return self._until_stop(new)

    def finish(self) -> str:
        """Return the text that was held back. Call this after the last token."""
        if self.stopped:
            return ""
        rest = self._until_stop(self._tokenizer.decode(self._ids)[len(self._decoded) :]) + self._held
        self._held, self._ids, self._decoded = "", [], ""
        return rest

    def _until_stop(self, new: str) -> str:
        text = self._held + new
        starts = [location for stop in self._stop if (location := text.find(stop)) >= 0]
        if starts:
            self.stopped, self._held = True, ""
            return text[: min(starts)]
        overlap = max((_overlap_length(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - overlap :]
        return text[: len(text) - overlap]


def _overlap_length(text: str, stop: str) -> int:
    """Count the characters at the end of a text with which `stop` begins."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)


class Texts:
    """The texts of all rows while their tokens are generated. An instance is an `on_token` of `generate`.

    A row ends at one of the `stop` texts; `changed` is called after each step. Tokens in `ends` have no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rows: int,
        stop: Sequence[str],
        changed: Callable[[Texts], None] = lambda texts: None,
        *,
        ends: Collection[int] = (),
    ) -> None:
        self.texts = [""] * rows
        self.complete = [False] * rows
        self._streams = [TextStream(tokenizer, stop) for _ in range(rows)]
        self._changed = changed
        self._ends = ends

    def __call__(self, tokens: Sequence[int | None]) -> list[int]:
        """Add a token to each row, None for a row that has ended; return the rows that end at a stop text."""
        for row, token in enumerate(tokens):
            if token is None:
                self._complete(row)
            elif token not in self._ends:
                self.texts[row] += self._streams[row].feed(token)
                self.complete[row] |= self._streams[row].stopped
        self._changed(self)
        return [row for row, stream in enumerate(self._streams) if stream.stopped]

    def finish(self) -> list[str]:
        """Return the texts of all rows. Call this after the last token."""
        for row in range(len(self.texts)):
            self._complete(row)
        self._changed(self)
        return self.texts

    def _complete(self, row: int) -> None:
        if not self.complete[row]:
            self.texts[row] += self._streams[row].finish()
            self.complete[row] = True


class NumberTokenizer:
    """Numbers as text, for models without a tokenizer: the text of 5 and 7 is `5, 7`."""

    vocab_size = 0

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; raise ValueError for anything but numbers separated by commas."""
        return [self._number(item.strip()) for item in text.split(",")] if text.strip() else []

    def decode(self, ids: Sequence[int]) -> str:
        return ", ".join(map(str, ids))

    def special(self, text: str) -> int | None:
        return self._number(text.strip())

    def _number(self, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ValueError(f"{quoted(text)} is not a token id: ids are integers, as in `5,7`")
        return int(text)

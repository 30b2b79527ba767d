"""Text in windows of equal length, to predict the next token; and tokenizers: characters, bytes, or a trained one."""

from __future__ import annotations

import glob
import gzip
import hashlib
import os
from importlib import resources
from pathlib import Path
from typing import Literal, Self

import numpy as np

import tfkit
from tfkit.component import Immaterial, slot
from tfkit.errors import Invalid, SpecError, closest, quoted
from tfkit.run.contract import Data, DataConfig, Tokenizer, TokenizerConfig
from tfkit.run.kinds.examples import StreamData

SHIPPED = "tinyshakespeare"


class TextConfig(DataConfig):
    """Text in windows of `length` tokens; the target of each token is the next one.

    The files are read in the order of the list, the files of a pattern by name, and follow each other without anything
    between them. Splits are ranges of the text, in their order.
    """

    kind: Literal["text"] = "text"

    files: Immaterial[str | tuple[str, ...]]
    """`tinyshakespeare`, which comes with tfkit; a path or a pattern such as `src/**/*.py`; or a list of them."""
    tokenizer: TokenizerConfig = slot("characters")
    """Text to tokens."""

    @property
    def takes_length(self) -> bool:
        return True

    def located(self, folder: Path) -> Self:
        files = tuple(_located(name, folder) for name in self._names())
        return self.model_copy(update={"files": files, "tokenizer": self.tokenizer.located(folder)})

    def build(self, length: int | None) -> StreamData:
        assert length is not None
        text = "".join(map(_content, self._names()))
        if not text:
            raise Invalid("files", "the text is empty")
        try:
            tokenizer = self.tokenizer.build(text)
        except Invalid as error:
            raise Invalid(f"tokenizer.{error.field}", error.message, help=error.help) from error
        tokens = np.asarray(tokenizer.encode(text), dtype=np.int64)
        parts = {name: tokens[start:end] for name, (start, end) in self.ends(len(tokens)).items()}
        content = hashlib.sha256(text.encode() + tokens.astype("<i8").tobytes()).hexdigest()
        return StreamData(parts, length, tokenizer.vocab_size, tokenizer, content)

    def _names(self) -> tuple[str, ...]:
        return (self.files,) if isinstance(self.files, str) else self.files


def _located(name: str, folder: Path) -> str:
    return name if name == SHIPPED else str((folder / name).absolute())


def _content(name: str) -> str:
    """Read the text of a file, or of all files that a pattern matches."""
    if name == SHIPPED:
        packed = (resources.files("tfkit") / "data" / f"{SHIPPED}.txt.gz").read_bytes()
        return gzip.decompress(packed).decode()
    paths = [name] if os.path.isfile(name) else sorted(glob.glob(name, recursive=True))
    files = [path for path in paths if os.path.isfile(path)]
    if not files:
        near = closest(Path(name).name, _neighbors(Path(name)))
        start = "relative paths start at the folder of the run's file"
        help = f"a file with a similar name exists: `{near}`" if near else start
        raise Invalid("files", f"there is no file {quoted(shown(name))}", help=help)
    return "".join(map(_read, files))


def _neighbors(path: Path) -> list[str]:
    """Return the names in the folder of a file; an empty list if the folder cannot be read."""
    try:
        return os.listdir(path.parent)
    except (OSError, ValueError):
        return []


def shown(name: str) -> str:
    """Return a path as errors show it: relative if it is below the current folder."""
    relative = os.path.relpath(name)
    return name if relative.startswith(os.pardir) else relative


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode()
    except OSError as error:
        raise Invalid("files", f"cannot read {quoted(shown(path))}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Invalid("files", f"{quoted(shown(path))} is not UTF-8: byte {error.start:,}") from error


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

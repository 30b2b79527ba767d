"""Text in windows of equal length, for next-token prediction; and tokenizers for characters, bytes, and from files."""

from __future__ import annotations

import glob
import gzip
import hashlib
import os
import shlex
from importlib import resources
from pathlib import Path
from textwrap import shorten
from typing import Literal, Self

import numpy as np

import tfkit
from tfkit.component import Immaterial, slot
from tfkit.errors import Invalid, SpecError, closest_name, listing, quoted
from tfkit.run.contract import DataConfig, Ids, Tokenizer, TokenizerConfig, bare_ids
from tfkit.run.kinds.examples import StreamData
from tfkit.run.read_rows import open_data

SHIPPED = "tinyshakespeare"


class TextFilesConfig(DataConfig):
    """Fields of data from text files."""

    files: Immaterial[str | tuple[str, ...]]
    """`tinyshakespeare`, which comes with tfkit; a path or a pattern such as `src/**/*.py`; or a list of paths and
    patterns."""
    tokenizer: TokenizerConfig = slot("characters")
    """Text to tokens."""

    @property
    def takes_length(self) -> bool:
        return True

    def located(self, folder: Path) -> Self:
        files = tuple(_absolute_name(name, folder) for name in self._names())
        return self.model_copy(update={"files": files, "tokenizer": self.tokenizer.located(folder)})

    def read(self) -> tuple[dict[str, Ids], Tokenizer, str]:
        """Return the tokens of each split, the tokenizer, and a digest of the text and the tokens."""
        text = "".join(map(_read_text, self._names()))
        if not text:
            names = listing(quoted(displayed_path(name)) for name in self._names())
            raise Invalid("files", f"{names} must have at least one character; the text is empty")
        tokenizer = tokenizer_for(self.tokenizer, text)
        tokens = np.asarray(tokenizer.encode(text), dtype=np.int64)
        parts = {name: tokens[start:end] for name, (start, end) in self.ends(len(tokens)).items()}
        return parts, tokenizer, hashlib.sha256(text.encode() + tokens.astype("<i8").tobytes()).hexdigest()

    def _names(self) -> tuple[str, ...]:
        return (self.files,) if isinstance(self.files, str) else self.files


class TextConfig(TextFilesConfig):
    """Text in windows of `length` tokens; the target of each token is the next token.

    Files are joined in the order of the list, the files of a pattern in the order of their names, without a separator.
    Splits are consecutive ranges of the text.
    """

    kind: Literal["text"] = "text"

    @property
    def windows(self) -> bool:
        return True

    def build(self, length: int | None) -> StreamData:
        assert length is not None
        parts, tokenizer, content = self.read()
        return StreamData(parts, length, tokenizer.vocab_size, tokenizer, content)


def tokenizer_for(config: TokenizerConfig, text: str) -> Tokenizer:
    """Build the tokenizer in the field `tokenizer` of a data kind."""
    try:
        return config.build(text)
    except Invalid as error:
        raise Invalid(f"tokenizer.{error.field}", error.message, help=error.help) from error


def _absolute_name(name: str, folder: Path) -> str:
    return name if name == SHIPPED else str((folder / name).absolute())


def _read_text(name: str) -> str:
    """Read the text of a file, or of all files that a pattern matches."""
    if name == SHIPPED:
        packed = (resources.files("tfkit") / "data" / f"{SHIPPED}.txt.gz").read_bytes()
        return gzip.decompress(packed).decode()
    return "".join(map(_read_file, files_of(name)))


def files_of(name: str, *, folders: bool = False) -> list[str]:
    """Return the file of a path, or all files that a pattern matches; with `folders`, folders count as files."""
    exists = os.path.exists if folders else os.path.isfile
    if os.path.exists(name):
        return [name]
    files = [path for path in sorted(glob.glob(name, recursive=True)) if exists(path)]
    if not files:
        near = closest_name(Path(name).name, _sibling_names(Path(name)))
        start = "relative paths start at the folder of the run's file"
        help = f"a file with a similar name exists: `{near}`" if near else start
        raise Invalid("files", f"there is no file {quoted(displayed_path(name))}", help=help)
    return files


def _sibling_names(path: Path) -> list[str]:
    """Return the names in the folder of a file; an empty list if the folder cannot be read."""
    try:
        return os.listdir(path.parent)
    except (OSError, ValueError):
        return []


def displayed_path(name: str) -> str:
    """Return a path relative to the current folder if it lies below that folder, else unchanged."""
    relative = os.path.relpath(name)
    return name if relative.startswith(os.pardir) else relative


def _read_file(path: str) -> str:
    try:
        with open_data(path) as file:
            return file.read().decode()
    except MemoryError:
        size = os.path.getsize(path)
        raise Invalid(
            "files", f"{quoted(displayed_path(path))} does not fit in memory: it has {size:,} bytes"
        ) from None
    except UnicodeDecodeError as error:
        raise Invalid("files", f"{quoted(displayed_path(path))} is not UTF-8: byte {error.start:,}") from error


class CharactersConfig(TokenizerConfig):
    """One token for each character in the data, with ids in the order of Unicode."""

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
            return tfkit.FileTokenizer.read(Path(displayed_path(self.path)))
        except SpecError as error:
            command = shlex.join(["tfkit", "tokenizer", "TEXT", "-o", displayed_path(self.path)])
            raise Invalid("path", error.diagnostics[0].message, help=f"train a tokenizer: `{command}`") from error


class PretrainedConfig(TokenizerConfig):
    """A folder with a tokenizer, as `AutoTokenizer` of transformers writes it.

    transformers reads the folder if it is installed; otherwise tfkit reads its `tokenizer.json`. Code in the folder
    never runs.
    """

    kind: Literal["pretrained"] = "pretrained"

    path: Immaterial[str]
    """The path of the folder."""

    def located(self, folder: Path) -> Self:
        return self.model_copy(update={"path": str((folder / self.path).absolute())})

    def build(self, text: str) -> Tokenizer:
        if not os.path.isdir(self.path):
            raise Invalid(
                "path", f"there is no folder {quoted(displayed_path(self.path))}", help="name the folder of a tokenizer"
            )
        try:
            files = sorted(Path(self.path).iterdir())
        except OSError as error:
            message = f"cannot read {quoted(displayed_path(self.path))}: {error.strerror}"
            raise Invalid("path", message, help="name a folder that you may read") from error
        for path in files:
            if path.exists() and not path.is_file() and not path.is_dir():  # reading could block or never end
                raise Invalid("path", f"{quoted(displayed_path(str(path)))} must be a file; got a pipe or a device")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            file = FileConfig(path=os.path.join(self.path, "tokenizer.json")).build(text)
            assert isinstance(file, tfkit.FileTokenizer)
            file.folder = Path(self.path)
            return file
        try:
            loaded = AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
            return tfkit.FileTokenizer(loaded.backend_tokenizer, displayed_path(self.path), Path(self.path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises nothing narrower, and a panic is no `Exception`
            message = f"{quoted(displayed_path(self.path))} must be a tokenizer that transformers can read"
            notes = (shorten(str(error), 300, placeholder=" ..."),)
            raise Invalid("path", message, notes=notes, help="write it with `save_pretrained`") from error


def id_of(token: str | int, tokenizer: Tokenizer | None, field: str) -> int:
    """Return the id of a token, which is a text or an id; raise `Invalid` for `field` if the text is not one token."""
    if isinstance(token, int):
        return token
    try:
        ids = [] if tokenizer is None else bare_ids(tokenizer, token)
    except ValueError:
        ids = []
    if len(ids) != 1:
        raise Invalid(field, f"{quoted(token)} is not a token of the data")
    return ids[0]

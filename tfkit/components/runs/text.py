"""Text in windows of equal length, to predict the next token."""

from __future__ import annotations

import glob
import gzip
import hashlib
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from tfkit.component import (
    IGNORED,
    Batch,
    DataConfig,
    Examples,
    Immaterial,
    Order,
    Tokenizer,
    TokenizerConfig,
    slot,
)
from tfkit.errors import Invalid, closest, quoted

SHIPPED = "tinyshakespeare"
Ids = NDArray[np.int64]


class TextConfig(DataConfig):
    """Text in windows of `length` tokens; the target of each token is the next one.

    The files are read in the order of the list, those of a pattern by name, and follow each other without anything
    between them. Splits are ranges of the text, in their order.
    """

    kind: Literal["text"] = "text"
    takes_length = True

    files: Immaterial[str | tuple[str, ...]]
    """`tinyshakespeare`, which comes with tfkit; a path or a pattern such as `src/**/*.py`; or a list of them."""
    tokenizer: TokenizerConfig = slot("characters")
    """Text to tokens."""

    def located(self, folder: Path) -> Self:
        return self.model_copy(update={"files": tuple(_located(one, folder) for one in self._names())})

    def build(self, length: int | None) -> TextData:
        assert length is not None
        text = "".join(map(_content, self._names()))
        if not text:
            raise Invalid("files", "the text is empty")
        tokenizer = self.tokenizer.build(text)
        tokens = np.asarray(tokenizer.encode(text), dtype=np.int64)
        parts = {name: tokens[start:end] for name, (start, end) in self.ends(len(tokens)).items()}
        for name, part in parts.items():
            if len(part) <= length:
                message = f"split `{name}` has {len(part):,} tokens, too few for one window of {length:,} and a target"
                raise Invalid("split", message)
        return TextData(parts, length, tokenizer, hashlib.sha256(text.encode()).hexdigest())

    def _names(self) -> tuple[str, ...]:
        return (self.files,) if isinstance(self.files, str) else self.files


def _located(name: str, folder: Path) -> str:
    return name if name == SHIPPED else str((folder / name).absolute())


def _content(name: str) -> str:
    """The text of a file, or of all files that a pattern matches."""
    if name == SHIPPED:
        packed = (resources.files("tfkit") / "data" / f"{SHIPPED}.txt.gz").read_bytes()
        return gzip.decompress(packed).decode()
    paths = [name] if Path(name).is_file() else sorted(glob.glob(name, recursive=True))
    files = [path for path in paths if Path(path).is_file()]
    if not files:
        near = closest(Path(name).name, os.listdir(Path(name).parent) if Path(name).parent.is_dir() else [])
        start = "relative paths start at the folder of the run's file"
        help = f"a file with a similar name exists: `{near}`" if near else start
        raise Invalid("files", f"there is no file {quoted(_shown(name))}", help=help)
    return "".join(map(_read, files))


def _shown(name: str) -> str:
    """A path as errors show it: relative if it is below the current folder."""
    relative = os.path.relpath(name)
    return name if relative.startswith(os.pardir) else relative


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode()
    except OSError as error:
        raise Invalid("files", f"cannot read {quoted(_shown(path))}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Invalid("files", f"{quoted(_shown(path))} is not UTF-8: byte {error.start:,}") from error


@dataclass(frozen=True)
class TextData:
    """The tokens of each split."""

    parts: dict[str, Ids]
    length: int
    tokenizer: Tokenizer
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        """The size of the tokenizer's vocabulary."""
        return self.tokenizer.vocab_size

    @property
    def splits(self) -> list[str]:
        """Their names."""
        return list(self.parts)

    def examples(self, split: str, order: Order) -> Examples:
        return Windows(self.parts[split], self.length, stride=1 if order == "sampled" else self.length)


class Windows:
    """Windows of tokens, one at each multiple of `stride`.

    With a stride of 1 all are complete; with that of their length, they cover the text, and targets behind its end do
    not count.
    """

    def __init__(self, tokens: Ids, length: int, *, stride: int) -> None:
        self._tokens, self._stride = tokens, stride
        self._offsets = np.arange(length + 1)
        self._count = len(tokens) - length if stride == 1 else -(-(len(tokens) - 1) // stride)

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Ids) -> Batch:
        places = indices[:, None] * self._stride + self._offsets
        inside = places < len(self._tokens)
        ids = self._tokens[np.where(inside, places, 0)]
        targets = np.where(inside[:, 1:], ids[:, 1:], IGNORED)
        return Batch({"tokens": ids[:, :-1]}, targets)

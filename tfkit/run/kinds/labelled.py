"""Texts or features with classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tfkit.component import optional_slot
from tfkit.errors import Invalid, listing
from tfkit.run.contract import IGNORED, Batch, Data, Ids, Tokenizer, TokenizerConfig
from tfkit.run.kinds.columns import ColumnsConfig, Long, Names, Ragged, encoded, fingerprint, fitted, masks_of
from tfkit.run.kinds.examples import RowsData
from tfkit.run.kinds.text import tokenizer_for
from tfkit.run.read_rows import Row

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LabelledConfig(ColumnsConfig):
    """Texts or features with a class each, or with a class for each position. The data has `n_classes`.

    Examples are as long as their texts, up to `length`, and padded to the longest of a batch.
    """

    kind: Literal["labelled"] = "labelled"

    text: str | None = None
    """The column of the text; or `features`."""
    features: Names | None = None
    """A column of vectors, a list of lists of numbers, or a list of numbers, which are vectors of width 1. Or several
    columns of numbers, which together are a single vector."""
    target: str = "label"
    """The column of the class: its number, or its name. A list has a class for each position."""
    classes: tuple[str, ...] | None = None
    """The names of the classes, in order; by default all names in the files, sorted, unless classes are numbers."""
    long: Long = "error"
    """The treatment of an example of more than `length` positions: report it, leave it out, or use its beginning."""
    tokenizer: TokenizerConfig | None = optional_slot("characters")
    """Text to tokens, with its special tokens around each text."""

    def check(self) -> None:
        """Raise `Invalid` unless the data has either texts with a tokenizer, or features."""
        super().check()
        if (self.text is None) == (self.features is None):
            got = "neither" if self.text is None else "both"
            raise Invalid("text", f"the data must have one of `text` and `features`; got {got}")
        if self.text is not None and self.tokenizer is None:
            raise Invalid("tokenizer", "`tokenizer` is missing: texts need it", help="add it: `tokenizer: bytes`")
        if self.features is not None and self.tokenizer is not None:
            raise Invalid("tokenizer", "`tokenizer` has no effect: features are not text", help="remove it")

    def build(self, length: int | None) -> Data:
        assert length is not None
        parts = self.read()
        rows = [row for part in parts.values() for row in part]
        texts = [] if self.text is None else [row.text(self.text) for row in rows]
        tokenizer = None if self.tokenizer is None else tokenizer_for(self.tokenizer, "".join(texts))
        numbers, each = self._numbers(rows), isinstance(rows[0][self.target], list)
        width = None if self.text is not None else self._vectors(rows[0]).shape[1]
        examples = {}
        for name, part in parts.items():
            values: list[Any] = [self._value(row, tokenizer, width) for row in part]
            labels = [self._labels(row, numbers, len(value), each) for row, value in zip(part, values, strict=True)]
            kept = fitted(part, list(map(len, values)), length, self.long)
            inputs = (Ragged if width is None else Ragged.of_vectors)([values[i][:length] for i in kept])
            examples[name] = LabelledExamples(inputs, Ragged([labels[i][:length] for i in kept]), each)
        content = fingerprint([*texts, *map(str, numbers)], examples)
        vocab_size = 1 if tokenizer is None else tokenizer.vocab_size
        return LabelledData(examples, length, vocab_size, tokenizer, content, max(numbers.values()) + 1)

    def _value(self, row: Row, tokenizer: Tokenizer | None, width: int | None) -> Any:
        """Return the ids or the features of a row."""
        if tokenizer is None:
            return self._vectors(row, width)
        return encoded(row, row.text(str(self.text)), tokenizer.encode)

    def _vectors(self, row: Row, width: int | None = None) -> NDArray[np.float32]:
        """Return the features of a row, [n, width]."""
        if isinstance(self.features, tuple):
            return np.concatenate([_array(row, column, "a number", axes=0) for column in self.features], axis=1)
        assert self.features is not None
        expected = "a list of numbers, or of lists of numbers" + ("" if width is None else f", of width {width}")
        vectors = _array(row, self.features, expected, axes=2)
        if not len(vectors) or width not in (None, vectors.shape[1]):
            raise row.error(self.features, expected)
        return vectors

    def _numbers(self, rows: Sequence[Row]) -> Mapping[str | int, int]:
        """Return the number of each class."""
        if self.classes is not None:
            return {name: number for number, name in enumerate(self.classes)}
        values = {value for row in rows for value in self._values(row)}
        if all(isinstance(value, int) or value.isdecimal() for value in values):
            return {value: int(value) for value in sorted(values, key=int)}
        return {name: number for number, name in enumerate(sorted(map(str, values)))}

    def _values(self, row: Row) -> Iterator[str | int]:
        value = row[self.target]
        for label in value if isinstance(value, list) else [value]:
            if not isinstance(label, str) and not (isinstance(label, int) and label >= 0):
                raise row.error(self.target, "the name or the number of a class, or a list of them")
            yield label

    def _labels(self, row: Row, numbers: Mapping[str | int, int], count: int, each: bool) -> list[int]:
        labels = list(self._values(row))
        if isinstance(row[self.target], list) != each or (each and len(labels) != count):
            raise row.error(self.target, f"a list of {count} classes, one for each position" if each else "one class")
        if not all(label in numbers for label in labels):
            raise row.error(self.target, f"one of the classes: {listing(map(str, numbers))}")
        return [numbers[label] for label in labels]


def _array(row: Row, column: str, expected: str, *, axes: int) -> NDArray[np.float32]:
    """Return the finite numbers in a column, [n, width]."""
    try:
        values = np.asarray(row[column], dtype=np.float32)
    except (ValueError, TypeError) as error:
        raise row.error(column, expected) from error
    if not np.isfinite(values).all() or (values.ndim != axes and (axes, values.ndim) != (2, 1)):
        raise row.error(column, expected)
    return values.reshape(len(values) if values.ndim else 1, -1)


@dataclass(frozen=True)
class LabelledExamples:
    """Inputs with their classes, one for each example, or for each position."""

    inputs: Ragged
    labels: Ragged
    each: bool

    def __len__(self) -> int:
        return len(self.inputs)

    def digest(self) -> bytes:
        return self.inputs.digest() + self.labels.digest()

    def batch(self, indices: Ids) -> Batch:
        inputs, mask = self.inputs.padded(indices)
        targets, _ = self.labels.padded(indices, IGNORED)
        name = "tokens" if inputs.ndim == 2 else "features"
        return Batch({name: inputs}, targets if self.each else targets[:, 0], masks=masks_of({name: mask}))


@dataclass(frozen=True)
class LabelledData(RowsData):
    """Examples with classes."""

    n_classes: int = 0

"""Texts or features with classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tfkit.component import optional_slot
from tfkit.errors import Invalid, listing
from tfkit.run.contract import IGNORE_INDEX, Batch, Data, Ids, Tokenizer, TokenizerConfig
from tfkit.run.kinds.columns import (
    ColumnsConfig,
    Long,
    Names,
    Ragged,
    data_fingerprint,
    encoded_text,
    fitting_indices,
    masks_of,
)
from tfkit.run.kinds.examples import RowsData
from tfkit.run.kinds.text import tokenizer_for
from tfkit.run.read_rows import Row

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAX_FLOAT32 = np.finfo(np.float32).max


class InputColumnsConfig(ColumnsConfig):
    """Rows whose input is a text or features."""

    text: str | None = None
    """The column of the text; or `features`."""
    features: Names | None = None
    """The column of the features: a list of vectors, or a list of numbers, which are vectors of width 1. Or several
    columns of numbers, which together form a single vector."""
    long: Long = "error"
    """The treatment of an example of more than `length` positions: report it, omit it, or use its beginning."""
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

    def _value(self, row: Row, tokenizer: Tokenizer | None, width: int | None) -> Any:
        """Return the ids or the features of a row."""
        if tokenizer is None:
            return self._vectors(row, width)
        return encoded_text(row, row.text(str(self.text)), tokenizer.encode)

    def _vectors(self, row: Row, width: int | None = None) -> NDArray[np.float32]:
        """Return the features of a row, [n, width]."""
        if isinstance(self.features, tuple):
            columns = [column_numbers(row, column, "a number", axes=0) for column in self.features]
            return np.concatenate(columns, axis=1).astype(np.float32)
        assert self.features is not None
        expected = "a list of numbers, or of lists of numbers" + ("" if width is None else f", of width {width}")
        vectors = column_numbers(row, self.features, expected, axes=2)
        if width not in (None, vectors.shape[1]):
            raise row.error(self.features, expected)
        return vectors.astype(np.float32)


class LabelledConfig(InputColumnsConfig):
    """Texts or features with a class each, or with a class for each position. The data has `n_classes`.

    Examples are as long as their texts, up to `length`, and padded to the longest of a batch.
    """

    kind: Literal["labelled"] = "labelled"

    target: str | dict[str, str] = "label"
    """The column of the class, which is a number or a name, or a list with a class for each position. For a model with
    several outputs, a mapping from each output in the loss to its column."""
    classes: tuple[str, ...] | dict[str, tuple[str, ...]] | None = None
    """The names of the classes, in order; by default all names in the files, sorted, unless classes are numbers. With
    several targets, a mapping from outputs to the names."""

    def check(self) -> None:
        """Raise `Invalid` unless `classes` fits `target`."""
        super().check()
        outputs = self.target if isinstance(self.target, dict) else {}
        if outputs != self.target and isinstance(self.classes, dict):
            raise Invalid("classes", "`classes` must be a list, because there is one target; got a mapping")
        if outputs == self.target and isinstance(self.classes, tuple):
            raise Invalid("classes", "`classes` must be a mapping from outputs, as `target` is; got a list")
        if not outputs and not isinstance(self.target, str):
            raise Invalid("target", "`target` must have at least one output; got none")
        for name in self.classes if isinstance(self.classes, dict) else ():
            if name not in outputs:
                message = f"`{name}` is not an output in `target`"
                raise Invalid(f"classes.{name}", message, notes=[f"outputs: {listing(outputs)}"])

    def build(self, length: int | None) -> Data:
        assert length is not None
        parts = self.read()
        rows = [row for part in parts.values() for row in part]
        texts = [] if self.text is None else [row.text(self.text) for row in rows]
        tokenizer = None if self.tokenizer is None else tokenizer_for(self.tokenizer, "".join(texts))
        columns = self.target if isinstance(self.target, dict) else {"": self.target}
        names = self.classes if isinstance(self.classes, dict) else {"": self.classes}
        targets = {output: _Target.of(rows, column, names.get(output)) for output, column in columns.items()}
        width = None if self.text is not None else self._vectors(rows[0]).shape[1]
        examples = {}
        for name, part in parts.items():
            values: list[Any] = [self._value(row, tokenizer, width) for row in part]
            labels = {
                output: [target.labels(row, len(value)) for row, value in zip(part, values, strict=True)]
                for output, target in targets.items()
            }
            fitting = fitting_indices(part, list(map(len, values)), length, self.long)
            inputs = (Ragged if width is None else Ragged.of_vectors)([values[i][:length] for i in fitting])
            ragged = {output: Ragged([of_rows[i][:length] for i in fitting]) for output, of_rows in labels.items()}
            examples[name] = LabelledExamples(inputs, ragged, {name: target.each for name, target in targets.items()})
        warnings = tuple(warning for target in targets.values() for warning in target.warnings(parts))
        content = data_fingerprint(
            [*texts, *(str(name) for target in targets.values() for name in target.numbers)], examples
        )
        vocab_size = 1 if tokenizer is None else tokenizer.vocab_size
        n_classes = {output: target.n_classes for output, target in targets.items()}
        return LabelledData(
            examples,
            length,
            vocab_size,
            tokenizer,
            content,
            n_classes=n_classes.get("", n_classes),
            warnings=warnings,
            classes=targets[""].classes if "" in targets else None,
        )


@dataclass(frozen=True)
class _Target:
    """A column of classes.

    Attributes:
        column: the name of the column.
        numbers: the number of each class.
        each: True if each position has a class, False if each example has.
    """

    column: str
    numbers: Mapping[str | int, int]
    each: bool

    @classmethod
    def of(cls, rows: Sequence[Row], column: str, names: Sequence[str] | None) -> _Target:
        """Return the target in a column of the rows. `names` are the classes; by default, the rows determine them."""
        numbers: dict[str | int, int]
        types: set[type] = set()
        values: set[str | int] = set()
        for row in rows:
            for value in _classes_in_row(row, column):
                types.add(type(value))
                values.add(value)
                if len(types) > 1:
                    message = "a class of the same type as in the rows before"
                    raise row.error(column, message, help="write all classes as numbers, or all as texts")
        if names is not None:
            numbers = {name: number for number, name in enumerate(names)}
        elif all(isinstance(value, int) or _is_number(value) for value in values):
            numbers = {value: int(value) for value in sorted(values, key=int)}
        else:
            numbers = {name: number for number, name in enumerate(sorted(map(str, values)))}
        return cls(column, numbers, isinstance(rows[0][column], list))

    def warnings(self, parts: Mapping[str, Sequence[Row]]) -> Iterator[Invalid]:
        """Yield a warning for numbers of classes that no row has, and for each split that lacks a class."""
        rows: dict[int, Row] = {}
        splits: dict[str, set[int]] = {name: set() for name in parts}
        for name, part in parts.items():
            for row in part:
                classes = {self.numbers[label] for label in _classes_in_row(row, self.column)}
                splits[name] |= classes
                rows |= dict.fromkeys(classes - rows.keys(), row)
        if absent := self.n_classes - len(rows):
            largest = f"the largest class is {max(rows):,}, in {rows[max(rows)].location}"
            message = f"{absent:,} of the {self.n_classes:,} classes of column `{self.column}` are in no row"
            yield Invalid("files", message, notes=(largest,), help="correct the class, or list `classes`")
        names = {number: str(name) for name, number in self.numbers.items()}
        for name, classes in splits.items():
            if lacking := [names[number] for number in sorted(rows.keys() - classes)]:
                message = f"the split `{name}` has no row of {len(lacking):,} of the {len(rows):,} classes that occur"
                note = f"classes of column `{self.column}`: {listing(lacking)}"
                help = "use larger splits, or name the files of each split"
                yield Invalid("files", message, notes=(note,), help=help)

    @property
    def n_classes(self) -> int:
        """One more than the largest number of a class."""
        return max(self.numbers.values()) + 1

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes in order; None for classes that are numbers."""
        are_numbers = all(str(name) == str(number) for name, number in self.numbers.items())
        return None if are_numbers else [str(name) for name in self.numbers]

    def labels(self, row: Row, count: int) -> list[int]:
        """Return the numbers of the classes of a row of `count` positions."""
        labels = list(_classes_in_row(row, self.column))
        if isinstance(row[self.column], list) != self.each or (self.each and len(labels) != count):
            expected = f"a list of {count} classes, one for each position" if self.each else "one class"
            raise row.error(self.column, expected)
        if not all(label in self.numbers for label in labels):
            raise row.error(self.column, f"one of the classes: {listing(map(str, self.numbers))}")
        return [self.numbers[label] for label in labels]


def _classes_in_row(row: Row, column: str) -> Iterator[str | int]:
    value = row[column]
    for label in value if isinstance(value, list) else [value]:
        if not isinstance(label, str) and not (isinstance(label, int) and 0 <= label < 2**31):
            raise row.error(column, "the name or the number of a class, or a list of them")
        yield label


def _is_number(name: str) -> bool:
    """Return True for a number as Python writes it. `01` is a name, because it would be the class of `1`."""
    return name.isascii() and name.isdecimal() and len(name) < 10 and str(int(name)) == name


def column_numbers(row: Row, column: str, expected: str, *, axes: int) -> NDArray[np.float64]:
    """Return the finite numbers in a column, [n, width]; raise `Invalid` if the column has none."""
    try:
        values = np.asarray(row[column], dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise row.error(column, expected) from error
    if (
        not values.size
        or not (np.abs(values) <= MAX_FLOAT32).all()
        or (values.ndim != axes and (axes, values.ndim) != (2, 1))
    ):
        raise row.error(column, expected)
    return values.reshape(len(values) if values.ndim else 1, -1)


@dataclass(frozen=True)
class InputExamples:
    """Inputs of examples: texts as ids, or features."""

    inputs: Ragged

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def positions(self) -> int:
        """The number of positions of all examples, without padding."""
        return int(self.inputs.sizes.sum())

    def padded_inputs(self, indices: Ids) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.bool_]]]:
        """Return the inputs of a batch, and their masks."""
        inputs, mask = self.inputs.padded(indices)
        name = "tokens" if inputs.ndim == 2 else "features"
        return {name: inputs}, masks_of({name: mask})


@dataclass(frozen=True)
class LabelledExamples(InputExamples):
    """Inputs with their classes by output, for each example or each position. The name of a single target is empty."""

    labels: Mapping[str, Ragged]
    each: Mapping[str, bool]

    def digest(self) -> bytes:
        return self.inputs.digest() + b"".join(labels.digest() for labels in self.labels.values())

    def batch(self, indices: Ids) -> Batch:
        inputs, masks = self.padded_inputs(indices)
        targets = {output: self._targets(output, indices) for output in self.labels}
        further = {output: ids for output, ids in targets.items() if output}
        return Batch(inputs, next(iter(targets.values())), masks=masks, further_targets=further)

    def _targets(self, output: str, indices: Ids) -> Ids:
        ids = self.labels[output].padded(indices, IGNORE_INDEX)[0]
        return ids if self.each[output] else ids[:, 0]


@dataclass(frozen=True)
class LabelledData(RowsData):
    """Examples with classes."""

    n_classes: int | Mapping[str, int] = 0
    warnings: tuple[Invalid, ...] = ()
    classes: Sequence[str] | None = None

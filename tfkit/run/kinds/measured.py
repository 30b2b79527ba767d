"""Texts or features with real numbers as targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tfkit.errors import Invalid, quoted
from tfkit.run.contract import Batch, Data, Ids
from tfkit.run.kinds.columns import Names, Ragged, data_fingerprint, fitting_indices
from tfkit.run.kinds.examples import RowsData
from tfkit.run.kinds.labelled import InputColumnsConfig, InputExamples, column_numbers
from tfkit.run.kinds.text import tokenizer_for
from tfkit.run.read_rows import Row

if TYPE_CHECKING:
    from numpy.typing import NDArray


class MeasuredConfig(InputColumnsConfig):
    """Texts or features with real numbers as targets, for the loss `regression`.

    By default, the targets of a model are standardized: each number minus the mean of its column in the split `train`,
    divided by the standard deviation. The metrics `mse` and `mae` are in the units of the column all the same. The data
    has `mean` and `std`, with which the outputs of the model are converted: `output * std + mean`.
    """

    kind: Literal["measured"] = "measured"

    target: Names = "target"
    """The column of the number, or of a list of numbers; or several columns of a number each."""
    each_position: bool = False
    """If true, the column has a list with a number, or a list of numbers, for each position."""
    standardize: bool = True
    """If false, the targets are the numbers of the column."""

    def check(self) -> None:
        """Raise `Invalid` unless targets for each position are in a single column."""
        super().check()
        if self.target == ():
            raise Invalid("target", "`target` must have at least one column; got none")
        if self.each_position and isinstance(self.target, tuple):
            message = "`target` must be a single column, because `each_position` is true"
            raise Invalid("target", message, help="write a list of numbers for each position into one column")

    def build(self, length: int | None) -> Data:
        assert length is not None
        parts = self.read()
        rows = [row for part in parts.values() for row in part]
        texts = [] if self.text is None else [row.text(self.text) for row in rows]
        tokenizer = None if self.tokenizer is None else tokenizer_for(self.tokenizer, "".join(texts))
        width = None if self.text is not None else self._vectors(rows[0]).shape[1]
        shape = self._targets(rows[0]).shape[1:]
        inputs, targets = {}, {}
        for name, part in parts.items():
            values: list[Any] = [self._value(row, tokenizer, width) for row in part]
            numbers = [self._targets(row, shape) for row in part]
            for row, value, vectors in zip(part, values, numbers, strict=True):
                if self.each_position and len(vectors) != len(value):
                    raise row.error(str(self.target), f"a list of {len(value)} numbers, one for each position")
            fitting = fitting_indices(part, list(map(len, values)), length, self.long)
            inputs[name] = (Ragged if width is None else Ragged.of_vectors)([values[i][:length] for i in fitting])
            targets[name] = [numbers[i][:length] for i in fitting]
        mean, std = self._mean_and_std(np.concatenate(targets["train"]))
        examples = {
            name: MeasuredExamples(
                inputs[name],
                Ragged.of_vectors([((numbers - mean) / std).astype(np.float32) for numbers in targets[name]]),
                self.each_position,
            )
            for name in parts
        }
        content = data_fingerprint([*texts, str((mean.tolist(), std.tolist()))], examples)
        vocab_size = 0 if tokenizer is None else tokenizer.vocab_size
        return MeasuredData(
            examples, length, vocab_size, tokenizer, content, mean=mean.ravel().tolist(), std=std.ravel().tolist()
        )

    def _targets(self, row: Row, shape: tuple[int, ...] | None = None) -> NDArray[np.float64]:
        """Return the targets of a row, [n] or [n, width]; n is 1 unless `each_position` is true."""
        if isinstance(self.target, tuple):
            return np.concatenate([column_numbers(row, name, "a number", axes=0) for name in self.target], axis=1)
        value, expected = row[self.target], "a number, or a list of numbers"
        if self.each_position:
            expected = "a list with a number, or a list of numbers, for each position"
            targets = column_numbers(row, self.target, expected, axes=2)
            scalar = not isinstance(value[0], list)
        else:
            scalar = not isinstance(value, list)
            targets = column_numbers(row, self.target, expected, axes=0 if scalar else 1).reshape(1, -1)
        targets = targets[:, 0] if scalar else targets
        if shape not in (None, targets.shape[1:]):
            numbers = "a number" if shape == () else f"{shape[0]} numbers"
            raise row.error(
                self.target, f"{numbers}{' for each position' if self.each_position else ''}, as in the first row"
            )
        return targets

    def _mean_and_std(self, targets: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        if not self.standardize:
            return np.zeros(targets.shape[1:]), np.ones(targets.shape[1:])
        mean, std = targets.mean(axis=0), targets.std(axis=0)
        # Rounding of the mean gives a constant column a tiny standard deviation.
        constant = np.flatnonzero(std <= 1e-12 * np.abs(mean))
        if len(constant):
            column = self.target if isinstance(self.target, str) else self.target[constant[0]]
            message = f"the column {quoted(column)} must have different numbers in the split `train`; got only"
            help = "choose a different column, or write `standardize: false`"
            raise Invalid("target", f"{message} {mean.ravel()[constant[0]]:g}", help=help)
        return mean, std


@dataclass(frozen=True)
class MeasuredExamples(InputExamples):
    """Inputs with their targets, for each example or each position.

    Attributes:
        each: True if each position has targets.
    """

    targets: Ragged
    each: bool

    def digest(self) -> bytes:
        return self.inputs.digest() + self.targets.digest()

    def batch(self, indices: Ids) -> Batch:
        inputs, masks = self.padded_inputs(indices)
        targets, counted = self.targets.padded(indices, np.nan)
        if not self.each:
            return Batch(inputs, targets[:, 0], masks=masks)
        return Batch(inputs, targets, masks=masks, counted=counted)


@dataclass(frozen=True)
class MeasuredData(RowsData):
    """Examples with real targets."""

    mean: Sequence[float] = ()
    """The number that was subtracted from each target."""
    std: Sequence[float] = ()
    """The number by which each target was divided."""

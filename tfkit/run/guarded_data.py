"""Data of a run. Exceptions in its code, and batches that break its contract, become errors of its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tfkit.errors import SpecError
from tfkit.run.contract import IGNORED, Batch, Data, Examples, Ids, Order, Tokenizer

Fault = Callable[[str, BaseException], SpecError]
"""The function that returns the error for the name of a method that failed, and its exception."""


@contextmanager
def guarded(fault: Fault, method: str) -> Iterator[None]:
    """Turn an exception of a component's method into its error. SpecError and an interrupt pass."""
    try:
        yield
    except (SpecError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise fault(method, error) from error


class GuardedData:
    """Data whose methods are guarded."""

    def __init__(self, data: Data, fault: Fault) -> None:
        self._data, self._fault = data, fault
        with guarded(fault, "`build`"):
            self.vocab_size, self.length = data.vocab_size, data.length
            self.splits: Sequence[str] = data.splits

    @property
    def fingerprint(self) -> str:
        """A digest of everything that the config does not determine, such as the content of files."""
        with guarded(self._fault, "`fingerprint`"):
            return self._data.fingerprint

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the data; None if its ids do not stand for text."""
        return self._data.tokenizer

    def examples(self, split: str, order: Order) -> Examples:
        """Return the examples of a split."""
        with guarded(self._fault, "`examples`"):
            return _GuardedExamples(self._data.examples(split, order), self)

    def check(self, batch: Batch, count: int) -> Batch:
        """Return a batch; raise SpecError unless it has `count` rows of ids within the vocabulary."""
        with guarded(self._fault, "`batch`"):
            if not isinstance(batch, Batch):
                raise TypeError(f"it must return a Batch; got {type(batch).__name__}")
            for name, ids in {**batch.inputs, "targets": batch.targets}.items():
                _check_array(name, ids, count)
                _check_range(name, ids[ids != IGNORED] if name == "targets" else ids, self.vocab_size)
            for name, ids in batch.further_targets.items():
                _check_array(name, ids, count, axes=(1, 2))
        return batch


class _GuardedExamples:
    """Examples whose batches are checked."""

    def __init__(self, examples: Examples, data: GuardedData) -> None:
        self._examples, self._data = examples, data

    def __len__(self) -> int:
        with guarded(self._data._fault, "`__len__` of its examples"):
            return len(self._examples)

    def batch(self, indices: Ids) -> Batch:
        """Return the examples of these indices."""
        with guarded(self._data._fault, "`batch`"):
            batch = self._examples.batch(indices)
        return self._data.check(batch, len(indices))


def _check_array(name: str, ids: object, count: int, axes: tuple[int, ...] = (2,)) -> None:
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim not in axes or len(ids) != count:
        value = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise TypeError(f"`{name}` must be an array of integers with {count} rows and two axes; got {value}")


def _check_range(name: str, ids: Ids, size: int) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < size):
        raise ValueError(f"`{name}` must have ids from 0 to {size - 1:,}; got {ids.min():,} to {ids.max():,}")

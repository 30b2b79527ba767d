"""Guards around the data of a run: exceptions and batches that violate the contract become errors of its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from tfkit.errors import Invalid, SpecError
from tfkit.run.contract import IGNORE_INDEX, Batch, Data, Examples, Ids, Order, Tokenizer

Fault = Callable[[str, BaseException], SpecError]
"""Builds the error for the name of a failed method and its exception."""


@contextmanager
def guarded_call(fault: Fault, method: str) -> Iterator[None]:
    """Turn an exception of a component's method into an error of the component, except SpecError and interrupts."""
    try:
        yield
    except (SpecError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise fault(method, error) from error


class GuardedData:
    """Data whose exceptions become errors of its kind, and whose batches are checked."""

    def __init__(self, data: Data, fault: Fault) -> None:
        self._data, self._fault = data, fault
        with guarded_call(fault, "`build`"):
            self.vocab_size, self.length = data.vocab_size, data.length
            self.n_classes: int | Mapping[str, int] | None = getattr(data, "n_classes", None)
            self.start, self.end = (self._id(name) for name in ("start", "end"))
            self.classes: Sequence[str] | None = getattr(data, "classes", None)
            self.pixel_scale: Sequence[Sequence[float]] | None = getattr(data, "pixel_scale", None)
            self.mean: Sequence[float] = getattr(data, "mean", (0.0,))
            self.std: Sequence[float] = getattr(data, "std", (1.0,))
            self.splits: Sequence[str] = data.splits
            self.warnings: Sequence[Invalid] = getattr(data, "warnings", ())

    def _id(self, name: str) -> int | None:
        token = getattr(self._data, name, None)
        if token is not None and not (isinstance(token, int) and 0 <= token < self.vocab_size):
            raise TypeError(f"`{name}` must be None or an id below {self.vocab_size:,}; got {token!r}")
        return token

    @property
    def fingerprint(self) -> str:
        """Digest of everything that the config does not determine, such as the content of files."""
        with guarded_call(self._fault, "`fingerprint`"):
            return self._data.fingerprint

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the data; None if its ids do not stand for text."""
        return self._data.tokenizer

    def examples(self, split: str, order: Order) -> Examples:
        """Return the examples of a split."""
        with guarded_call(self._fault, "`examples`"):
            return _GuardedExamples(self._data.examples(split, order), self)

    def check(self, batch: Batch, count: int) -> Batch:
        """Return a batch; raise SpecError unless it has `count` rows, of ids within the vocabulary or of features."""
        with guarded_call(self._fault, "`batch`"):
            if not isinstance(batch, Batch):
                raise TypeError(f"it must return a Batch; got {type(batch).__name__}")
            for name, values in batch.inputs.items():
                if getattr(values, "dtype", None) == np.float32:
                    _check_array(name, values, count, "float32", min(max(values.ndim, 2), 5))
                else:
                    _check_array(name, values, count, "integers", 2)
                    _check_range(name, values, self.vocab_size)
            if batch.size != count:
                raise ValueError(f"the inputs must have {count} rows; got {batch.size}")
            self._check_targets(batch, count)
            classes = self.n_classes if isinstance(self.n_classes, Mapping) else {}
            for name, ids in batch.further_targets.items():
                _check_array(name, ids, count, "integers", 1 if np.ndim(ids) == 1 else 2)
                if name in classes:
                    _check_range(name, ids[ids != IGNORE_INDEX], classes[name])
            _check_masks(batch)
            for alternative in batch.alternatives:
                self.check(alternative, count)
        return batch

    def _check_targets(self, batch: Batch, count: int) -> None:
        targets, counted = batch.targets, batch.counted
        real = getattr(targets, "dtype", None) == np.float32
        if counted is not None:
            _check_array("counted", counted, count, "bool", 1 if np.ndim(counted) == 1 else 2)
            if not real:
                raise ValueError(f"`counted` must belong to real targets; ids that do not count are {IGNORE_INDEX}")
            assert targets is not None
            if counted.shape != targets.shape[: counted.ndim]:
                raise ValueError(f"`counted` must have the first axes of the targets, {list(targets.shape)}")
        if targets is not None and real:
            _check_array("targets", targets, count, "float32", max(np.ndim(targets), 1))
        elif targets is not None:
            _check_array("targets", targets, count, "integers", 1 if np.ndim(targets) == 1 else 2)
            by_output = (
                self.n_classes if isinstance(self.n_classes, Mapping) else {"": self.n_classes or self.vocab_size}
            )
            classes = by_output.get("")
            if classes is not None:
                _check_range("targets", targets[targets != IGNORE_INDEX], classes)


class _GuardedExamples:
    """Examples whose batches are checked."""

    def __init__(self, examples: Examples, data: GuardedData) -> None:
        self._examples, self._data = examples, data
        self.positions: int | None = getattr(examples, "positions", None)
        if self.positions is not None and self.positions < len(examples):
            message = f"`positions` must be at least the number of examples, {len(examples):,}; got {self.positions:,}"
            raise ValueError(message)

    def __len__(self) -> int:
        with guarded_call(self._data._fault, "`__len__` of its examples"):
            return len(self._examples)

    def batch(self, indices: Ids) -> Batch:
        """Return the examples with these indices."""
        with guarded_call(self._data._fault, "`batch`"):
            batch = self._examples.batch(indices)
            if self.positions is None and getattr(batch, "masks", None):
                raise ValueError(
                    "examples whose batches have masks must have `positions`, their number without padding"
                )
        return self._data.check(batch, len(indices))


_KINDS = {"integers": "iu", "float32": "f", "bool": "b"}
_AXES = {1: "one axis", 2: "two axes", 3: "three axes", 4: "four axes", 5: "five axes"}


def _check_array(name: str, values: object, count: int, type_: str, axes: int) -> None:
    array = values if isinstance(values, np.ndarray) else None
    if array is None or array.dtype.kind not in _KINDS[type_] or array.ndim != axes or len(array) != count:
        value = type(values).__name__ if array is None else f"{array.dtype} {list(array.shape)}"
        raise TypeError(f"`{name}` must be an array of {type_} with {count} rows and {_AXES[axes]}; got {value}")


def _check_masks(batch: Batch) -> None:
    for name, mask in batch.masks.items():
        if name not in batch.inputs:
            raise ValueError(f"a mask must belong to an input: {', '.join(batch.inputs)}; got `{name}`")
        _check_array(f"masks[{name!r}]", mask, batch.size, "bool", 2)
        if mask.shape != batch.inputs[name].shape[:2] or not mask.any(axis=1).all():
            raise ValueError(f"the mask of `{name}` must have the shape of the input, and a token in each row")
        if (
            len(batch.inputs) == 1
            and batch.targets is not None
            and batch.targets.dtype.kind in "iu"
            and mask.shape == batch.targets.shape
            and (~mask & (batch.targets != IGNORE_INDEX)).any()
        ):
            raise ValueError(f"targets must be {IGNORE_INDEX} at padding")


def _check_range(name: str, ids: Ids, size: int) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < size):
        raise ValueError(f"`{name}` must have ids from 0 to {size - 1:,}; got {ids.min():,} to {ids.max():,}")

"""Several data kinds in one run, mixed by weight."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from tfkit.component import Config
from tfkit.errors import Invalid
from tfkit.run.contract import IGNORE_INDEX, Batch, Data, DataConfig, Examples, Ids, NonNegative, Order, Tokenizer
from tfkit.run.kinds.columns import masks_of
from tfkit.run.kinds.examples import positions_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_EXAMPLES = 2**40
"""Maximum number of examples in an epoch."""


class MixedConfig(Config):
    """One part of a mixture."""

    weight: NonNegative = 1.0
    """The frequency of the part's examples, relative to the weights of the other parts; a part with 0 is only
    evaluated."""
    data: DataConfig
    """The data of the part."""


class MixtureConfig(DataConfig):
    """Examples of several data kinds, mixed by weight. All parts must have the same inputs and the same vocabulary.

    In one epoch, every example of each part occurs at least once. The split `train` has the training examples of all
    parts. The remaining splits are those splits of each part, such as `web_val` for `val` of the part `web`.
    """

    kind: Literal["mixture"] = "mixture"

    of: dict[str, MixedConfig]
    """The parts by name."""

    def check(self) -> None:
        """Raise `Invalid` for fields without effect, and if no part has a weight above 0."""
        super().check()
        if "split" in self.model_fields_set:
            raise Invalid("split", "`split` has no effect here", help="write it in the data of each part")
        if not any(part.weight for part in self.of.values()):
            raise Invalid("of", "a mixture must have a part with a weight above 0")
        for name, part in self.of.items():
            if "order" in part.data.model_fields_set:
                raise Invalid(f"of.{name}.data.order", "`order` has no effect here", help="write it as `data.order`")

    @property
    def takes_length(self) -> bool:
        return any(part.data.takes_length for part in self.of.values())

    @property
    def windows(self) -> bool:
        return all(part.data.windows for part in self.of.values())

    @property
    def split_names(self) -> tuple[str, ...]:
        return ("train", *(f"{name}_{split}" for name, split in self._evaluated()))

    def _evaluated(self) -> list[tuple[str, str]]:
        """Return the parts, each with the splits that can be evaluated."""
        splits = [(name, split) for name, part in self.of.items() for split in part.data.split_names]
        return [(name, split) for name, split in splits if split != "train" or not self.of[name].weight]

    def located(self, folder: Path) -> Self:
        parts = {name: part.model_copy(update={"data": part.data.located(folder)}) for name, part in self.of.items()}
        return self.model_copy(update={"of": parts})

    def build(self, length: int | None) -> Data:
        parts = {}
        for name, part in self.of.items():
            try:
                parts[name] = part.data.build(length if part.data.takes_length else None)
            except Invalid as error:
                field = f"of.{name}.data.{error.field}".rstrip(".")
                raise Invalid(field, error.message, notes=error.notes, help=error.help) from error
        _check_equal(parts)
        return Mixture(parts, {name: part.weight for name, part in self.of.items()}, self._evaluated())


def _check_equal(parts: Mapping[str, Data]) -> None:
    """Raise `Invalid` unless all parts have the same token for each id."""
    for name, data in parts.items():
        if isinstance(getattr(data, "n_classes", None), Mapping):
            raise Invalid(f"of.{name}.data", "a part of a mixture must have one target; got several")
    sizes = {name: data.vocab_size for name, data in parts.items()}
    if len(set(sizes.values())) > 1:
        got = ", ".join(f"`{name}` {size:,}" for name, size in sizes.items())
        help = "use one tokenizer, and name the tokens that parts add, such as `separator` and `end`"
        raise Invalid("of", f"all parts must have the same number of tokens; got {got}", help=help)
    files = {name: _tokenizer_bytes(data.tokenizer) for name, data in parts.items() if data.tokenizer is not None}
    if len(set(files.values())) > 1:
        names = ", ".join(f"`{name}`" for name in files)
        raise Invalid("of", f"the parts {names} must have the same tokenizer", help="read it from one file")


def _tokenizer_bytes(tokenizer: Tokenizer) -> bytes:
    """Return the contents of a tokenizer's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / tokenizer.file
        tokenizer.save(path)
        return path.read_bytes()


class Mixture:
    """The data of a mixture; see `Data`."""

    def __init__(
        self, parts: Mapping[str, Data], weights: Mapping[str, float], evaluated: Sequence[tuple[str, str]]
    ) -> None:
        self._parts, self._weights = parts, weights
        self._evaluated = {f"{name}_{split}": (name, split) for name, split in evaluated}
        self.vocab_size = next(data.vocab_size for data in parts.values())
        self.length = max(data.length for data in parts.values())
        self.splits = ["train", *self._evaluated]
        self.tokenizer = next((data.tokenizer for data in parts.values() if data.tokenizer is not None), None)
        trained = [data for name, data in parts.items() if weights[name]]
        self.start, self.end = (
            _common_token([getattr(data, name, None) for data in trained]) for name in ("start", "end")
        )

    @property
    def fingerprint(self) -> str:
        """The fingerprints of all parts."""
        return ", ".join(f"{name} {data.fingerprint}" for name, data in self._parts.items())

    def examples(self, split: str, order: Order) -> Examples:
        if split != "train":
            name, split = self._evaluated[split]
            return self._parts[name].examples(split, order)
        names = [name for name, weight in self._weights.items() if weight]
        weights = [self._weights[name] for name in names]
        lengths = [self._parts[name].length for name in names]
        return Mixed([self._parts[name].examples("train", order) for name in names], weights, lengths)


def _common_token(tokens: Sequence[int | None]) -> int | None:
    """Return the token that all parts of a mixture have; None if they differ."""
    return tokens[0] if len(set(tokens)) == 1 else None


class Mixed:
    """Examples of several parts. The first indices are examples of the first part, and so on.

    `lengths` are the lengths of parts without padding.
    """

    def __init__(self, parts: Sequence[Examples], weights: Sequence[float], lengths: Sequence[int]) -> None:
        self._parts = parts
        passes = max(len(part) / weight for part, weight in zip(parts, weights, strict=True))
        counts = [max(round(passes * weight), len(part)) for part, weight in zip(parts, weights, strict=True)]
        if sum(counts) > MAX_EXAMPLES:
            raise Invalid("of", "the weights differ too much: an epoch would have more than 2^40 examples")
        self._ends = np.cumsum(counts)
        # Parts occur more than once, and not always completely: their means are exact only over complete epochs.
        positions = [
            count * positions_of(part, length) // len(part)
            for count, part, length in zip(counts, parts, lengths, strict=True)
        ]
        self.positions = sum(positions)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, indices: Ids) -> Batch:
        owners = np.searchsorted(self._ends, indices, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        batches, rows = [], []
        for owner in np.unique(owners).tolist():
            part, rows_of_part = self._parts[owner], np.flatnonzero(owners == owner)
            batches.append(part.batch((indices[rows_of_part] - starts[owner]) % len(part)))
            rows.append(rows_of_part)
        return batches[0] if len(batches) == 1 else _joined_batches(batches, np.argsort(np.concatenate(rows)))


def _joined_batches(batches: Sequence[Batch], order: Ids) -> Batch:
    """Join batches, padded to the longest example, and reorder their examples by `order`."""
    names = list(batches[0].inputs)
    for batch in batches:
        if list(batch.inputs) != names or not batch.has_ids or batch.ids.ndim != 2 or batch.alternatives:
            raise Invalid("of", "all parts with a weight must have the same inputs, and targets for each position")

    def rows(arrays: Sequence[NDArray[Any]], fill: int) -> NDArray[Any]:
        length = max(array.shape[1] for array in arrays)
        padded = [np.pad(array, ((0, 0), (0, length - array.shape[1])), constant_values=fill) for array in arrays]
        return np.concatenate(padded)[order]

    inputs = {name: rows([batch.inputs[name] for batch in batches], 0) for name in names}
    masks = {name: rows([_input_mask(batch, name) for batch in batches], False) for name in names}
    documents = None
    if any(batch.documents is not None for batch in batches):
        documents = rows([_document_numbers(batch) for batch in batches], 0)
    return Batch(inputs, rows([batch.ids for batch in batches], IGNORE_INDEX), documents, masks_of(masks))


def _input_mask(batch: Batch, name: str) -> NDArray[np.bool_]:
    return batch.masks.get(name, np.ones(batch.inputs[name].shape[:2], dtype=bool))


def _document_numbers(batch: Batch) -> Ids:
    return np.zeros(batch.ids.shape, np.int64) if batch.documents is None else batch.documents

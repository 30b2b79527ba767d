"""The memory that is live while a model runs on the meta device: nothing is allocated, but everything has a size."""

from __future__ import annotations

import weakref
from itertools import count

from torch import Tensor

from tfkit.torch_private.tensors import storage_key


class LiveMemory:
    """Bytes of the storages made while it watched that still exist: `level` now, `peak` the most since that was set."""

    def __init__(self) -> None:
        self.level = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._next = count()

    def add(self, tensor: Tensor) -> bool:
        """Watch the storage of a tensor; returns True if it was new."""
        if not self._meet(tensor):
            return False
        self._sizes[storage_key(tensor)] = nbytes(tensor)
        self.grow(nbytes(tensor))
        return True

    def number(self, tensor: Tensor) -> int:
        """Return a number that tensors share if they share memory; earlier storages do not count."""
        self._meet(tensor)
        return self._numbers[storage_key(tensor)]

    def grow(self, n: int) -> None:
        """Add bytes, or remove them, that belong to no storage here."""
        self.level += n
        self.peak = max(self.peak, self.level)

    def _meet(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._numbers:
            return False
        self._numbers[key], self._sizes[key] = next(self._next), 0
        weakref.finalize(storage, self._drop, key)  # another storage may have the same address later
        return True

    def _drop(self, key: int) -> None:
        self.level -= self._sizes.pop(key)
        del self._numbers[key]


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of the memory behind a tensor, which may be a view."""
    return tensor.untyped_storage().nbytes()

"""The random numbers of a loss: each example has a separate generator.

The numbers of an example are therefore equal for every size of micro-batches, every number of processes, and every
resumed run. They are drawn on the CPU, so they are equal on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfkit.run.training.order import stream_generator


class Noise:
    """Random numbers for the examples of a batch, in the names of torch.

    b is the number of examples. Each call draws new numbers.

    Args:
        device: the device of the tensors.
        generators: a generator for each example.
    """

    def __init__(self, device: torch.device, generators: Sequence[np.random.Generator]) -> None:
        self._device, self._generators = device, generators
        # A decorator would import torch._dynamo with this module.
        self._stacked = torch.compiler.disable(self._drawn)

    @classmethod
    def of(cls, device: torch.device, seed: int, stream: str, number: int, rows: Iterable[int]) -> Noise:
        """Build the noise of some rows of the batch `number`."""
        return cls(device, [stream_generator(seed, stream, number, int(row)) for row in rows])

    def rand(self, *size: int) -> Tensor:
        """Return numbers from 0 to 1, without 1: float32, [b, *size]."""
        return self._stacked(lambda generator: generator.random(size, np.float32))

    def randn(self, *size: int) -> Tensor:
        """Return numbers of the standard normal distribution: float32, [b, *size]."""
        return self._stacked(lambda generator: generator.standard_normal(size, np.float32))

    def randint(self, high: int, *size: int) -> Tensor:
        """Return integers from 0 to `high` - 1: int64, [b, *size]."""
        return self._stacked(lambda generator: generator.integers(high, size=size))

    def _drawn(self, draw: Callable[[np.random.Generator], Any]) -> Tensor:
        return torch.from_numpy(np.stack([np.asarray(draw(generator)) for generator in self._generators])).to(
            self._device
        )

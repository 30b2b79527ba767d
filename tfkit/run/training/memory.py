"""The memory of a run: its peak, and the response to a lack of memory: a smaller micro-batch, or an error with help."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from tfkit.run.checked_run import Run

T = TypeVar("T")

OF_THE_CPU = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""Texts of torch's errors for a lack of memory on the CPU, which have no class."""


def peak_memory(device: torch.device) -> int:
    """Return the largest number of bytes in use so far: of tensors on a GPU, of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if torch raised an error because memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OF_THE_CPU)


class MicroBatch:
    """Number of sequences in one forward and backward pass, which may be smaller than the batch to save memory.

    Args:
        run: the run, whose `machine.micro_batch` is the initial number, or `auto`.
        note: called with a text whenever the number decreases.
    """

    def __init__(self, run: Run, note: Callable[[str], object] = lambda text: None) -> None:
        self.size = run.config.micro_batch
        self._run, self._note = run, note

    def fit(self, compute: Callable[[int], T], what: str = "a step") -> T:
        """Return `compute(size)`; with `auto`, repeat it with half the size for as long as memory runs out.

        Raises:
            SpecError: memory runs out, and the size cannot be decreased.
        """
        while True:
            try:
                return compute(self.size)
            except RuntimeError as error:
                self.size = self._smaller(error, what)
            self._note(f"{self.size:,}, since more do not fit into memory")

    def _smaller(self, error: RuntimeError, what: str) -> int:
        if not is_out_of_memory(error):
            raise error
        if self.size > 1 and self._run.config.machine.micro_batch == "auto":
            return -(-self.size // 2)
        machine = self._run.config.machine
        message = f"{what} with {self.size:,} sequences does not fit into the memory of `{machine.device}`"
        if self.size > 1:
            help = (
                "write `machine: {micro_batch: auto}`, which processes fewer sequences at a time and computes the same"
            )
        else:
            help = "make the examples shorter or the model smaller; `--plan` predicts the memory"
        raise self._run.error(message, "machine", "micro_batch", help=help) from error

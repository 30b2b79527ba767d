"""The memory of a run: its peak; and where it runs out, a smaller micro-batch, or an error that says what to change."""

from __future__ import annotations

import sys

import torch

from tfkit.errors import SpecError
from tfkit.graph.run import Run

OF_THE_CPU = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""The errors of torch for which it has no class."""


def peak(device: torch.device) -> int:
    """The largest number of bytes in use so far: of tensors on a GPU, of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def smaller(size: int, run: Run, wrong: RuntimeError) -> int:
    """The micro-batch to try after one of `size` sequences failed.

    Raises:
        SpecError: it must not become smaller.
        RuntimeError: `wrong`, which has another cause.
    """
    if not isinstance(wrong, torch.OutOfMemoryError) and not any(text in str(wrong) for text in OF_THE_CPU):
        raise wrong
    if size > 1 and run.config.machine.micro_batch == "auto":
        return -(-size // 2)
    raise _too_large(size, run) from wrong


def _too_large(size: int, run: Run) -> SpecError:
    message = f"a step with {size:,} sequences at once does not fit into the memory of `{run.config.machine.device}`"
    if size > 1:
        help = "`machine: {micro_batch: auto}` takes fewer at once, and computes the same"
    else:
        help = "make the examples shorter or the model smaller; `--plan` predicts the memory"
    return run.error(message, "machine", "micro_batch", help=help)

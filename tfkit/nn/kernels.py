"""The choice of the kernel that multiplies a large weight while tokens are decoded, by measuring this machine.

A token reads every weight once, and its time is the time of reading them. That time depends on the processor, on the
shape of the weight, on the number of rows that are multiplied with it, and on whether the rows or the columns of the
weight are contiguous in memory. torch has two kernels for it, its own and oneDNN's, and neither is always faster
(`tools/bench/README.md`, Decoding).

A `CachedModel` measures both kernels once for each batch size, a fifth of a second for GPT-2; `tfkit.prepare_decoding`
measures the memory layouts as well. Training and a single forward always use `F.linear`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.torch_private.onednn import has_product
from tfkit.torch_private.onednn import linear as by_onednn
from tfkit.torch_private.transforms import is_watched

Kernel = Literal["torch", "onednn"]
Case = tuple[int, int, int, bool]
"""d_out and d_in of the weight, rows of x, and true if the rows of the weight are contiguous."""

PLAIN_TYPES = (Tensor, nn.Parameter)
"""Types of plain tensors; a subclass (quantized, distributed) multiplies in its own way."""
MIN_ELEMENTS = 2**17
"""The fewest elements of a weight for which the kernel takes longer than its call."""
GUESS_LARGE, GUESS_ROWS = 2**19, 4
"""The smallest weight and number of rows for which oneDNN is assumed to be faster, if nothing was measured."""
ROUNDS = 3
SAMPLE = 2**26
"""The fewest bytes of weights of one shape that a race reads."""

_fastest: dict[Case, Kernel] = {}


class DecodingFlag(threading.local):
    """Active while a `CachedModel` reads tokens: only then does `linear` consider other kernels than torch's own."""

    active = False

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *_: object) -> None:
        self.active = False


decoding = DecodingFlag()


def onednn_is_faster(x: Tensor, weight: Tensor) -> bool:
    """Return True if oneDNN should multiply `weight` [d_out, d_in] with x [..., d_in]."""
    plain = type(x) in PLAIN_TYPES and x.is_cpu and x.dtype == torch.float32 and takes(weight)
    if not plain or torch.is_autocast_enabled("cpu") or is_watched():  # watchers only know `F.linear`
        return False
    rows = x.numel() // weight.size(1)
    fastest = _fastest.get(case_of(weight, rows))
    if fastest is None:
        return weight.numel() >= GUESS_LARGE and rows >= GUESS_ROWS
    return fastest == "onednn"


def takes(weight: Tensor) -> bool:
    """Return True if there is a choice of kernels for a weight: not for one that a library has wrapped or quantized."""
    plain = type(weight) in PLAIN_TYPES and weight.is_cpu and weight.dtype == torch.float32
    return plain and weight.dim() == 2 and weight.numel() >= MIN_ELEMENTS and ONEDNN and has_product()


def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the kernel of `torch.nn.functional.linear`."""
    return F.linear(x, weight, bias)


ONEDNN = torch.backends.mkldnn.is_available()
KERNELS: dict[Kernel, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {"torch": by_torch}
if ONEDNN:
    KERNELS["onednn"] = by_onednn


def large_weights(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the weights of a model for which several kernels exist, grouped by shape."""
    groups: dict[torch.Size, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if takes(parameter):
            groups.setdefault(parameter.shape, []).append(parameter)
    return list(groups.values())


def ask(groups: Sequence[Sequence[Tensor]], rows: int) -> list[dict[Kernel, float]]:
    """Let the kernels race on `rows` vectors, and remember the fastest of each group: weights of one shape and layout.

    Returns, for each group, the bytes of weights that each kernel reads per second.
    """
    speeds = _race([sample(group) for group in groups], rows)
    for group, speeds_of_group in zip(groups, speeds, strict=True):
        _fastest[case_of(group[0], rows)] = max(speeds_of_group, key=speeds_of_group.__getitem__)
    return speeds


def ask_once(model: nn.Module, rows: int) -> None:
    """Let the kernels race for the weights of a model for which they have not raced yet."""
    if unknown := [group for group in large_weights(model) if case_of(group[0], rows) not in _fastest]:
        ask(unknown, rows)


def sample(group: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the weights of one shape that a race reads."""
    return group[: -(-SAMPLE // group[0].nbytes)]


def case_of(weight: Tensor, rows: int) -> Case:
    """Return the values that the choice of a kernel depends on."""
    return (weight.size(0), weight.size(1), rows, weight.is_contiguous())


@torch.no_grad()
def _race(groups: Sequence[Sequence[Tensor]], rows: int) -> list[dict[Kernel, float]]:
    """Race the kernels in turns, each reading all groups, so that no kernel finds weights in the processor's cache.

    The clock is the CPU time of this thread, because others may use the processor too.
    """
    best = [dict.fromkeys(KERNELS, 0.0) for _ in groups]
    inputs = [torch.ones(rows, 1, group[0].size(1), device=group[0].device) for group in groups]
    for _ in range(ROUNDS):
        for name, kernel in KERNELS.items():
            for group, x, speeds in zip(groups, inputs, best, strict=True):
                start = time.thread_time()
                for weight in group:
                    kernel(x, weight, None)
                seconds = time.thread_time() - start
                speeds[name] = max(speeds[name], sum(weight.nbytes for weight in group) / seconds)
    return best

"""Tests for observers of operations: `torch.func`, forward-mode differentiation and dispatch modes.

torch has a public function only for the compiler, `torch.compiler.is_compiling`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.autograd import forward_ad

from tfkit.torch_private import optional

KERNELS = "choosing the fastest kernel while decoding"


def is_transformed() -> bool:
    """Return True while a transform of `torch.func` (`vmap`, `grad`, ...) runs."""
    stack = optional("torch._C._functorch.peek_interpreter_stack", "recognizing transforms of `torch.func`")
    return stack is not None and stack() is not None


@cache
def _names() -> tuple[Any, ...]:
    return (
        optional("torch._C._functorch.peek_interpreter_stack", KERNELS),
        optional("torch._C._len_torch_dispatch_stack", KERNELS),
        optional("torch.autograd.forward_ad._current_level", KERNELS),
    )


def is_watched() -> bool:
    """Return True if anything observes operations: a transform, forward-mode differentiation or a dispatch mode.

    Counters of operations and fake tensors are dispatch modes. If torch lacks a name that this test needs, return True.
    """
    names = _names()
    if None in names:
        return True
    transforms, modes, _ = names
    return transforms() is not None or modes() > 0 or vars(forward_ad)["_current_level"] >= 0

"""Tests for observers of operations: `torch.func`, forward-mode differentiation and dispatch modes.

torch has a public function only for the compiler, `torch.compiler.is_compiling`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.autograd import forward_ad

from tfkit.torch_private import optional_name

NAMES = (
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._len_torch_dispatch_stack",
    "torch.autograd.forward_ad._current_level",
)


@cache
def _observer_functions() -> tuple[Any, ...]:
    return tuple(optional_name(name, "choosing kernels while decoding, and for `torch.func`") for name in NAMES)


def is_transformed() -> bool:
    """Return True while a transform of `torch.func` (`vmap`, `grad`, ...) runs."""
    stack = _observer_functions()[0]
    return stack is not None and stack() is not None


def is_watched() -> bool:
    """Return True if anything observes operations: a transform, forward-mode differentiation or a dispatch mode.

    Counters of operations and fake tensors are dispatch modes. If torch lacks a name that this test needs, return True.
    """
    names = _observer_functions()
    return None in names or is_transformed() or names[1]() > 0 or vars(forward_ad)["_current_level"] >= 0

"""Tests for observers of operations: `torch.func`, forward-mode differentiation and dispatch modes.

torch has a public function only for the compiler, `torch.compiler.is_compiling`.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Return True while a transform of `torch.func` (`vmap`, `grad`, ...) runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_watched() -> bool:
    """Return True if anything observes operations: a transform, forward-mode differentiation or a dispatch mode.

    Counters of operations and fake tensors are dispatch modes.
    """
    return is_transformed() or forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack() > 0

"""Who follows the operations of a function: `torch.func`, forward-mode differentiation, dispatch modes.

torch has no public question for it; `torch.compiler.is_compiling` is that for the compiler.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Whether a transform of `torch.func` (`vmap`, `grad`, ...) runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_watched() -> bool:
    """Whether anything follows the operations: a transform, forward-mode differentiation, a dispatch mode.

    Counters of operations and fake tensors are dispatch modes.
    """
    return is_transformed() or forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack() > 0

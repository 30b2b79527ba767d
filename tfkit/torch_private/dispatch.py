"""Dispatch of operations on tensors, the autograd nodes that they create, and named ranges of a profile.

`torch.utils._python_dispatch`, on which torch's FLOP counter is built, has no public name. Neither have sequence
numbers, which give the order in which autograd nodes were created. The public `record_function` takes ten times as long
as a `QuickRange`, which takes 0.6 us.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

SOFTMAX = torch.ops.aten._softmax.default
LOG_SOFTMAX = torch.ops.aten._log_softmax.default
SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default
SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data.default
LOG_SOFTMAX_BACKWARD = torch.ops.aten._log_softmax_backward_data.default
TO_COPY = torch.ops.aten._to_copy.default
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""Operation of ATen that public functions run, but that has no public name."""

unobserved = _disable_current_modes
"""A context manager in which no `DispatchMode` sees operations."""

QuickRange = _RecordFunctionFast
"""name -> a context manager, which a trace shows as an operator."""


class DispatchMode(TorchDispatchMode):
    """Base class of modes whose `__torch_dispatch__` is called for every operation, forward and backward."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler


def running_node() -> Any:
    """Return the autograd node whose backward is running; None in a forward."""
    return torch._C._current_autograd_node()


def number_of(node: Any) -> int:
    """Return the sequence number of an autograd node: its index in the order of creation."""
    return int(node._sequence_nr())


def next_number() -> int:
    """Return the sequence number of the next autograd node of this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def is_mutable(operation: Any) -> bool:
    """Return True if an operation changes one of its arguments."""
    return bool(operation._schema.is_mutable)


@cache
def is_view(operation: Any) -> bool:
    """Return True if an operation returns memory of its arguments without changing it."""
    if operation is UNSAFE_VIEW:
        return True
    aliases = [result.alias_info for result in operation._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)

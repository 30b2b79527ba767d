"""Dispatch of operations on tensors, the autograd nodes that they create, and named ranges of a profile.

`torch.utils._python_dispatch`, on which torch's FLOP counter is built, has no public name. Neither have sequence
numbers, which give the order in which autograd nodes were created. The public `record_function` takes ten times as long
as a `QuickRange`, which takes 0.6 us.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tfkit.torch_private import MissingName, private_attribute, private_name

COST = "counting the operations of a model, as `tfkit cost` does"
SOFTMAX = private_name("torch.ops.aten._softmax.default", COST)
LOG_SOFTMAX = private_name("torch.ops.aten._log_softmax.default", COST)
SAFE_SOFTMAX = private_name("torch.ops.aten._safe_softmax.default", COST)
SOFTMAX_BACKWARD = private_name("torch.ops.aten._softmax_backward_data.default", COST)
LOG_SOFTMAX_BACKWARD = private_name("torch.ops.aten._log_softmax_backward_data.default", COST)
TO_COPY = private_name("torch.ops.aten._to_copy.default", COST)
UNSAFE_VIEW = private_name("torch.ops.aten._unsafe_view.default", COST)
"""Operation of ATen that public functions run, but that has no public name."""
OPERATIONS = (SOFTMAX, LOG_SOFTMAX, SAFE_SOFTMAX, SOFTMAX_BACKWARD, LOG_SOFTMAX_BACKWARD, TO_COPY, UNSAFE_VIEW)

unobserved = private_name("torch.utils._python_dispatch._disable_current_modes", COST)
"""A context manager in which no `DispatchMode` sees operations."""

QuickRange = private_name("torch._C._profiler._RecordFunctionFast", "the ranges of `tfkit profile`")
"""name -> a context manager, which a trace shows as an operator."""


_Mode = private_name("torch.utils._python_dispatch.TorchDispatchMode", COST)
_current_node = private_name("torch._C._current_autograd_node", COST)
_next_number = private_name("torch._C._autograd._get_sequence_nr", COST)


class DispatchMode(_Mode):  # type: ignore[misc, valid-type]
    """Base class of modes whose `__torch_dispatch__` is called for every operation, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        for name in (*OPERATIONS, _current_node, _next_number):
            if isinstance(name, MissingName):  # its operation would be counted as one without costs
                name.fail()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler


def running_node() -> Any:
    """Return the autograd node whose backward is running; None in a forward."""
    return _current_node()


def number_of(node: Any) -> int:
    """Return the sequence number of an autograd node: its index in the order of creation."""
    return int(private_attribute(node, "_sequence_nr", COST)())


def next_number() -> int:
    """Return the sequence number of the next autograd node of this thread."""
    return int(_next_number())


def is_mutable(operation: Any) -> bool:
    """Return True if an operation changes one of its arguments."""
    return bool(private_attribute(operation, "_schema", COST).is_mutable)


@cache
def is_view(operation: Any) -> bool:
    """Return True if an operation returns memory of its arguments without changing it."""
    if operation is UNSAFE_VIEW:
        return True
    aliases = [result.alias_info for result in private_attribute(operation, "_schema", COST).returns]
    return any(alias is not None and not alias.is_write for alias in aliases)

"""TorchScript without torch's deprecation warnings: torch no longer develops it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pkgutil import resolve_name

import torch

from tfkit.torch_private import optional_name

STORE = "torch.jit._recursive.concrete_type_store"
"""The classes that torch has scripted."""


@contextmanager
def no_deprecation_warnings() -> Iterator[None]:
    """Ignore torch's warnings that TorchScript is deprecated, which are of class `FutureWarning` since 2.15."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is (deprecated|not supported)")
        warnings.filterwarnings("ignore", "The TorchScript type system doesn't support")  # fx.GraphModule's own
        yield


def as_written() -> AbstractContextManager[None]:
    """Return a context in which programs run unoptimized: short runs take less time than torch's optimizer."""
    return torch.jit.optimized_execution(False)  # type: ignore[attr-defined]


def forget_classes() -> None:
    """Discard all scripted classes. A failure leaves an incomplete class, which the next script would use."""
    if optional_name(STORE, "discarding classes that cannot be scripted") is not None:
        resolve_name(STORE).__init__()  # the current store: others replace it, as torch's tests do

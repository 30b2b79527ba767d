"""TorchScript, which torch no longer develops, without what torch says about its age."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warnings that TorchScript is old: a `DeprecationWarning`, a `FutureWarning` since 2.15."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is (deprecated|not supported)")
        warnings.filterwarnings("ignore", "The TorchScript type system doesn't support")  # fx.GraphModule's own
        yield


def forget() -> None:
    """Forget all classes that were scripted: what fails leaves half a class behind, which would serve the next one."""
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()

"""The outputs of a model's modules in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Outputs = dict[str, Tensor]
"""The outputs of modules by path, in the order in which they first finished."""


@contextmanager
def recording(model: nn.Module, names: Iterable[str]) -> Iterator[Outputs]:
    """The outputs of the named modules: of several runs the first, of several values the first."""
    found: Outputs = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(value, Tensor):
                found.setdefault(name, value.detach())

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()

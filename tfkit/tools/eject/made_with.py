"""Remembers the arguments that tensors and torch's modules are made with, while a model is built."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tfkit.tools.eject.same_modules import MADE_WITH
from tfkit.tools.eject.torch_modules import CONTAINERS, OF_PARAMETERS
from tfkit.torch_private.tensors import storage_key

_MAKERS = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)


class Sizes(TorchFunctionMode):
    """Remembers the sizes that tensors were made with, with the names of numbers of the spec."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, tuple[Any, ...]] = {}
        self._kept: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MAKERS and args:
            sizes = args[0] if isinstance(args[0], tuple | list) else args
            self._found[storage_key(result)] = tuple(sizes)
            self._kept.append(result)
        return result

    def of(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return the shape of a tensor, with named numbers if it was made with them."""
        shape = tuple(tensor.shape)
        sizes = self._found.get(storage_key(tensor))
        return sizes if sizes == shape else shape


@contextmanager
def remembering() -> Iterator[Sizes]:
    """Make tensors, torch's modules, and their copies, remember their arguments as long as it is entered."""
    kinds = [kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.Module)]
    bases = {
        base for kind in kinds for base in kind.__mro__ if issubclass(base, nn.Module) and "__init__" in vars(base)
    }
    bases -= {nn.Module, *CONTAINERS.values(), *OF_PARAMETERS}
    originals = {base: vars(base)["__init__"] for base in bases}
    for base, original in originals.items():
        base.__init__ = _remembering(original)  # type: ignore[method-assign]
    try:
        with Sizes() as sizes:
            yield sizes
    finally:
        for base, original in originals.items():
            base.__init__ = original  # type: ignore[method-assign]


def _remembering(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.__dict__.setdefault(MADE_WITH, (args, dict(kwargs)))
        original(self, *args, **kwargs)

    return init

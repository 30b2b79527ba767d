"""Choices of the largest values, such as the choice of experts. Outputs are smooth while the choices stay equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Choices(TorchFunctionMode):
    """The choices of `torch.topk` in the run within its first `with`; runs in later ones make the same."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.left: Iterator[Tensor] | None = None

    def __enter__(self) -> Any:
        self.left = iter(self.made) if self.made else None
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.topk:
            return result
        if self.left is None:
            self.made.append(result.indices)
            return result
        chosen = next(self.left)
        return torch.return_types.topk((args[0].gather((kwargs or {}).get("dim", -1), chosen), chosen))

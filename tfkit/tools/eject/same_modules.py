"""Equal modules: modules of the same class, with the same numbers and equal children."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

_OWN = frozenset(nn.Module().__dict__)
MADE_WITH = "_tfkit_made_with"
"""Attribute in which torch's modules store their arguments while a model is ejected."""


def merge_alike(model: nn.Module) -> None:
    """Replace equal modules by the first of them, so that they become one module."""
    first: dict[Hashable, nn.Module] = {}

    def merged(module: nn.Module) -> nn.Module:
        for name, child in module._modules.items():
            module._modules[name] = None if child is None else merged(child)
        children = tuple((name, id(child)) for name, child in module._modules.items())
        key = (type(module), children, repr(sorted(plain(module).items())), repr(_tensors(module)))
        return first.setdefault(key, module)

    merged(model)


def _tensors(module: nn.Module) -> list[tuple[Any, ...]]:
    """Return facts about the tensors that a module holds directly, equal for equal modules."""
    named = [*module._parameters.items(), *module._buffers.items()]
    passing = module._non_persistent_buffers_set
    return [(n, None if t is None else (t.shape, t.dtype, t.requires_grad, n in passing)) for n, t in named]


def plain(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are neither parameters nor modules."""
    if isinstance(module, torch.fx.GraphModule):
        return {}
    return {name: value for name, value in module.__dict__.items() if name not in _OWN and name != MADE_WITH}


def is_torch(module: nn.Module) -> bool:
    """Return True if the class of a module is a class of torch, including lists and mappings of modules."""
    return type(module).__module__.startswith("torch.") and not isinstance(module, torch.fx.GraphModule)

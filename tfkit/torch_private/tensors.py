"""Tensors and their memory, modules and their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.utils._pytree import tree_leaves, tree_map

map_nested = tree_map
"""(f, nested) -> nested lists, tuples and mappings with `f` of each value."""

leaves = tree_leaves
"""The values in nested lists, tuples and mappings, in order."""


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers; faster than `leaves`."""
    if isinstance(nested, Tensor):
        yield nested
    for item in nested if isinstance(nested, list | tuple) else nested.values() if isinstance(nested, Mapping) else ():
        yield from tensors_in(item)


def storage_key(memory: Tensor | UntypedStorage) -> int:
    """Return a key that is equal for tensors that share memory, also on the meta device (`data_ptr` is 0)."""
    storage = memory.untyped_storage() if isinstance(memory, Tensor) else memory
    return storage._cdata


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; tensors of inference mode have no count."""
    return tensor._version


def replace_tensors(module: nn.Module, f: Callable[[Tensor], Tensor]) -> None:
    """Put `f` of each parameter and buffer in its place, as `Module.to` does; the parameters stay the same objects."""
    module._apply(f)


def has_state_dict_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Return True if this hook is registered by `register_state_dict_post_hook`, also on the copied module."""
    return hook in module._state_dict_hooks.values()

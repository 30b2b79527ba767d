"""Tensors and their memory, modules and their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.utils._pytree import tree_leaves, tree_map

from tfkit.torch_private.hooks import ObservingHook

map_nested = tree_map
"""(f, nested) -> nested lists, tuples and mappings, with `f` applied to each value."""

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
    """Return the number of in-place changes of a tensor. Tensors of inference mode do not count them."""
    return tensor._version


def replace_tensors(module: nn.Module, f: Callable[[Tensor], Tensor]) -> None:
    """Apply `f` to the data of each parameter and buffer, as `Module.to` does; parameters remain the same objects."""
    module._apply(f)


def has_forward_hook(module: nn.Module) -> bool:
    """Return True if a hook of the module can change its output."""
    return any(not isinstance(hook, ObservingHook) for hook in module._forward_hooks.values())


def has_forward_pre_hook(module: nn.Module) -> bool:
    """Return True if a hook of the module can change its inputs."""
    return any(not isinstance(hook, ObservingHook) for hook in module._forward_pre_hooks.values())


def has_state_dict_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Return True if `register_state_dict_post_hook` registered this hook on the module, or on its original."""
    return hook in module._state_dict_hooks.values()

"""Tensors and their memory, modules and their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, UntypedStorage, nn

from tfkit.torch_private import optional_name, private_attribute
from tfkit.torch_private.hooks import ObservingHook


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings, in order."""
    if isinstance(nested, Tensor):
        yield nested
    for item in nested if isinstance(nested, list | tuple) else nested.values() if isinstance(nested, Mapping) else ():
        yield from tensors_in(item)


def map_nested(f: Callable[[Any], Any], nested: Any) -> Any:
    """Return nested lists, tuples and mappings with `f` applied to each value."""
    if isinstance(nested, Mapping):
        return {name: map_nested(f, item) for name, item in nested.items()}
    if isinstance(nested, list | tuple):
        items = [map_nested(f, item) for item in nested]
        return type(nested)(*items) if hasattr(nested, "_fields") else type(nested)(items)
    return f(nested)


def storage_key(memory: Tensor | UntypedStorage) -> int:
    """Return a key that is equal for tensors that share memory, also on the meta device (`data_ptr` is 0)."""
    storage = memory.untyped_storage() if isinstance(memory, Tensor) else memory
    return int(private_attribute(storage, "_cdata", "recognizing tensors that share memory"))


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor. Tensors of inference mode do not count them."""
    version = optional_name("torch.Tensor._version", "checking that components do not change their inputs in place")
    return 0 if version is None else int(version.__get__(tensor))


def has_forward_hook(module: nn.Module) -> bool:
    """Return True if a hook of the module can change its output."""
    hooks = private_attribute(module, "_forward_hooks", "comparing a model with its spec")
    return any(not isinstance(hook, ObservingHook) for hook in hooks.values())


def has_forward_pre_hook(module: nn.Module) -> bool:
    """Return True if a hook of the module can change its inputs."""
    hooks = private_attribute(module, "_forward_pre_hooks", "comparing a model with its spec")
    return any(not isinstance(hook, ObservingHook) for hook in hooks.values())


def has_state_dict_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Return True if `register_state_dict_post_hook` registered this hook on the module, or on its original."""
    return hook in getattr(module, "_state_dict_hooks", {}).values()

"""State dicts that contain a model once, even if it is registered under several names.

Torch writes a module that is registered twice under both names. Here the shorter one stays, and loading accepts either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from tfkit.torch_private.sharding import local_part
from tfkit.torch_private.tensors import has_state_dict_hook, storage_key


@dataclass
class _Load:
    """One call of `load_state_dict`, identified by its list of missing keys: which places of a model were loaded."""

    missing: list[str]
    loaded: dict[str, bool] = field(default_factory=dict)


_LOADS: WeakKeyDictionary[nn.Module, _Load] = WeakKeyDictionary()


def keep_once(model: nn.Module) -> None:
    """Let a model be written once, and be complete if any of its names has been read."""
    if not has_state_dict_hook(model, _drop_copies):
        model.register_state_dict_post_hook(_drop_copies)
        model.register_load_state_dict_pre_hook(_note_place)
        model.register_load_state_dict_post_hook(_forgive_places)


def _drop_copies(model: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Keep the shorter of two names of the model: this place and a place that was written before."""
    values = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    name = next(iter(values), None)
    if name is None:
        return
    prefixes = [key.removesuffix(name) for key in state if key.endswith(f".{name}") or key == name]
    for other in prefixes:
        if other == prefix or not all(_same(state.get(other + suffix), value) for suffix, value in values.items()):
            continue
        for suffix in values:
            del state[(other if len(other) > len(prefix) else prefix) + suffix]
        return


def _same(value: object, other: object) -> bool:
    """Return True if two values of a state dict share their memory; for a `DTensor`, if its local tensors do."""
    value, other = local_part(value), local_part(other)
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return value is other
    return value.shape == other.shape and storage_key(value) == storage_key(other)


def _note_place(model: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    missing: list[str] = rest[2]
    if model not in _LOADS or _LOADS[model].missing is not missing:
        _LOADS[model] = _Load(missing)
    _LOADS[model].loaded[prefix] = any(key.startswith(prefix) for key in state)


def _forgive_places(model: nn.Module, _incompatible: Any) -> None:
    """Report nothing as missing for a place that was not loaded if another place was."""
    load = _LOADS[model]
    if any(load.loaded.values()):
        absent = tuple(prefix for prefix, loaded in load.loaded.items() if not loaded)
        load.missing[:] = [key for key in load.missing if not key.startswith(absent)]

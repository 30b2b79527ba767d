"""Keeps a model that is in a module several times, as beside its loss, only once in that module's state dict.

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
    """One call of `load_state_dict`, identified by its list of missing keys: which places of a model were given."""

    missing: list[str]
    given: dict[str, bool] = field(default_factory=dict)


_LOADS: WeakKeyDictionary[nn.Module, _Load] = WeakKeyDictionary()


def keep_once(model: nn.Module) -> None:
    """Let a model be written once, and be complete if any of its names has been read."""
    if not has_state_dict_hook(model, _drop_copies):
        model.register_state_dict_post_hook(_drop_copies)
        model.register_load_state_dict_pre_hook(_note_place)
        model.register_load_state_dict_post_hook(_forgive_places)


def _drop_copies(model: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Keep the shorter name of this place of the model and of one that was written before."""
    own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    name = next(iter(own), None)
    if name is None:
        return
    others = [key.removesuffix(name) for key in state if key.endswith(f".{name}") or key == name]
    for other in others:
        if other == prefix or not all(_same(state.get(other + one), value) for one, value in own.items()):
            continue
        for one in own:
            del state[(other if len(other) > len(prefix) else prefix) + one]
        return


def _same(one: object, other: object) -> bool:
    """True if two values of a state dict are the same memory; for a `DTensor`, if its local tensors are."""
    one, other = (local_part(value) for value in (one, other))
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other
    return one.shape == other.shape and storage_key(one) == storage_key(other)


def _note_place(model: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    missing: list[str] = rest[2]
    if model not in _LOADS or _LOADS[model].missing is not missing:
        _LOADS[model] = _Load(missing)
    _LOADS[model].given[prefix] = any(key.startswith(prefix) for key in state)


def _forgive_places(model: nn.Module, _incompatible: Any) -> None:
    """Report nothing as missing for a place that was not given, if another one was."""
    load = _LOADS[model]
    if any(load.given.values()):
        absent = tuple(prefix for prefix, given in load.given.items() if not given)
        load.missing[:] = [key for key in load.missing if not key.startswith(absent)]

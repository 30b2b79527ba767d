"""Global settings of torch that a plugin must not change, because they change every model of the process."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tfkit.errors import PluginWarning

_SETTINGS: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "default dtype": (lambda t: t.get_default_dtype(), lambda t, dtype: t.set_default_dtype(dtype)),
    "default device": (lambda t: str(t.get_default_device()), lambda t, name: t.set_default_device(_device(name))),
    "gradient mode": (lambda t: t.is_grad_enabled(), lambda t, mode: t.set_grad_enabled(mode)),
    "number of threads": (lambda t: t.get_num_threads(), lambda t, number: t.set_num_threads(number)),
    "deterministic algorithms": (
        lambda t: t.are_deterministic_algorithms_enabled(),
        lambda t, mode: t.use_deterministic_algorithms(mode),
    ),
    "float32 matmul precision": (
        lambda t: t.get_float32_matmul_precision(),
        lambda t, precision: t.set_float32_matmul_precision(precision),
    ),
}
"""The function that reads a setting and the function that sets it, each called with the module `torch`."""


@contextmanager
def unchanged_torch(plugin: str) -> Iterator[None]:
    """Restore the settings after code of a plugin has run, and warn of those that it changed."""
    torch = sys.modules["torch"]  # imported by the built-in components, which load before every plugin
    before = {name: read(torch) for name, (read, _) in _SETTINGS.items()}
    try:
        yield
    finally:
        changes = []
        for name, value in before.items():
            read, write = _SETTINGS[name]
            if (now := read(torch)) != value:
                write(torch, value)
                changes.append(f"torch's {name} from {value} to {now}")
        if changes:
            message = f"plugin {plugin} changes {', '.join(changes)}; tfkit restored the setting"
            warnings.warn(message, PluginWarning, stacklevel=2)


def _device(name: str) -> str | None:
    return None if name == "cpu" else name

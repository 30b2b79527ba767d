"""Sharing of hooks between modules: torch has public functions to register hooks, but none to list them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tfkit.torch_private import attribute

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@contextmanager
def borrowed_hooks(module: nn.Module, source: nn.Module) -> Iterator[None]:
    """Run the forward hooks of the submodules of `source` in the submodules of `module` that have the same paths."""
    sources = dict(source.named_modules())
    pairs = [(inner, sources[path]) for path, inner in module.named_modules() if path and path in sources]
    previous = [{name: inner.__dict__[name] for name in HOOKS} for inner, _ in pairs]
    for inner, original in pairs:
        inner.__dict__.update({name: attribute(original, name, "tracing inside layers") for name in HOOKS})
    try:
        yield
    finally:
        for (inner, _), hooks in zip(pairs, previous, strict=True):
            inner.__dict__.update(hooks)

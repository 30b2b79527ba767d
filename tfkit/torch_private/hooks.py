"""Lists of hooks: torch has public functions to register hooks, but none to list them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from tfkit.errors import Diagnostic, SpecError
from tfkit.torch_private import private_attribute

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
        inner.__dict__.update({name: private_attribute(original, name, "tracing inside layers") for name in HOOKS})
    try:
        yield
    finally:
        for (inner, _), hooks in zip(pairs, previous, strict=True):
            inner.__dict__.update(hooks)


@dataclass(eq=False)
class ObservingHook:
    """A forward hook of a plugin. It receives tensors of a model, and cannot replace them."""

    hook: Callable[..., Any]
    owner: str

    @property
    def __name__(self) -> str:  # TorchScript reads it first
        raise AttributeError(f"a forward hook of {self.owner} cannot be scripted")

    def __call__(self, *arguments: Any) -> None:
        """Call the hook; raise SpecError if it returns a value."""
        if (value := self.hook(*arguments)) is not None:
            message = f"a forward hook of {self.owner} must return None; got {type(value).__name__}"
            raise SpecError(Diagnostic(message, help="describe the change in the spec"))


@contextmanager
def observing_hooks(model: nn.Module, owner: str) -> Iterator[None]:
    """Turn the forward hooks that are registered in this context into `ObservingHook`s of `owner`."""
    numbers = {number for hooks in forward_hooks(model) for number in hooks}
    yield
    for hooks in forward_hooks(model):
        hooks.update({number: ObservingHook(hook, owner) for number, hook in hooks.items() if number not in numbers})


def forward_hooks(model: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Return the forward hooks and pre-hooks of each module by number. A change of a dictionary changes the module."""
    names, feature = ("_forward_hooks", "_forward_pre_hooks"), "hooks of plugins on built models"
    return [private_attribute(module, name, feature) for module in model.modules() for name in names]

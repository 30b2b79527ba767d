"""Names in a profile of a model: a range around each of its components."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from torch import fx, nn
from torch.autograd.profiler import record_function

from tfkit.tools.common.ownership import Ownership, owners_of
from tfkit.tools.cost.watch_step import frames_of
from tfkit.tools.profile.result import STEP_ROWS
from tfkit.torch_private.profiler import QuickRange

Range: TypeAlias = Callable[[str], Any]
"""name -> a context manager that the profiler sees."""
quick: Range = QuickRange
"""A range at a tenth of the time of `shown`, 0.6 us here; a plain operator in a trace."""
shown: Range = record_function
"""A range that trace viewers recognize as an annotation."""

STEP, BACKWARD = "[step]", "[backward]"
OWN = {f"[{name}]": Ownership(name, name, f"[{name}]", name, name) for name in STEP_ROWS}
"""Ranges that are rows of their own. No path of a model has brackets."""


def named_parts(model: fx.GraphModule) -> dict[str, Ownership]:
    """Return the modules that get a range, by path: nodes, layers and components, including the modules inside."""
    parts = owners_of(model)
    return {path: parts[path] for path in frames_of(model)}


@contextmanager
def named_ranges(model: fx.GraphModule, range: Range) -> Iterator[None]:
    """Put a range around each of the `named_parts`; on exit the model is restored."""
    running: list[Any] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            opened = range(path)
            opened.__enter__()
            running.append(opened)

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        for path in named_parts(model):
            module = model.get_submodule(path)
            hooks.enter_context(module.register_forward_pre_hook(enter(path), prepend=True))
            # A recomputed layer is left by an exception as soon as everything exists that the backward needs.
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        yield

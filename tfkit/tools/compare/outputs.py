"""The outputs of a model's components in one run, and their dependence on each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tfkit.errors import Diagnostic, SpecError

Outputs = dict[str, Tensor]
Replace = Callable[[Tensor], Tensor]
Run = Callable[[], Any]


def outputs(model: nn.Module | None, names: Iterable[str], run: Run, which: str) -> tuple[Outputs, list[str]]:
    """Run a model, and return the outputs of the named modules and of the full model (`""`).

    Also return the modules in the order in which they first finished.
    """
    values: Outputs = {}

    def keep(name: str) -> Replace:
        def value(output: Tensor) -> Tensor:
            values.setdefault(name, output.detach().clone())  # some models add to it in place
            return output

        return value

    try:
        with _hooks(model, {name: keep(name) for name in names}):
            result = run()
    except Exception as error:  # of a program or a model written by others
        cause = str(error).strip().partition("\n")[0]
        raise SpecError(Diagnostic(f"{which} fails on these inputs: {type(error).__name__}: {cause}")) from error
    order = list(values)
    values[""] = _tensor(result)
    return values, order


def depends(model: nn.Module, name: str, candidates: Iterable[str], run: Run) -> set[str]:
    """Return which of the other modules, or of the full model (`""`), a NaN in a module's output reaches."""

    def nothing(output: Tensor) -> Tensor:
        return torch.full_like(output, torch.nan) if output.is_floating_point() else output

    reached: set[str] = set()

    def look(candidate: str) -> Replace:
        def value(output: Tensor) -> Tensor:
            if output.isnan().any():
                reached.add(candidate)
            return output

        return value

    with _hooks(
        model, {name: nothing, **{candidate: look(candidate) for candidate in candidates if candidate != name}}
    ):
        if _tensor(run()).isnan().any():
            reached.add("")
    return reached


def _hooks(model: nn.Module | None, values: dict[str, Replace]) -> ExitStack:
    """Apply functions to the first tensor that each module returns, until the block ends."""

    def hook(replace: Replace) -> Callable[..., Any]:
        def called(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, Tensor):
                return replace(output)
            if type(output) in (tuple, list) and output and isinstance(output[0], Tensor):
                return type(output)([replace(output[0]), *output[1:]])
            return output

        return called

    hooks = ExitStack()
    for name, value in values.items():
        if model is not None:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(hook(value)))
    return hooks


def _tensor(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result

"""The outputs of a model's components in one run, and the others that are computed from each."""

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
    """The outputs of the named modules and of the whole (`""`), and the order in which the modules first finished."""
    found: Outputs = {}

    def keep(name: str) -> Replace:
        def value(output: Tensor) -> Tensor:
            found.setdefault(name, output.detach().clone())  # some models add to it in place
            return output

        return value

    try:
        with _hooks(model, {name: keep(name) for name in names}):
            result = run()
    except Exception as error:  # of a program or a model written by others
        cause = str(error).strip().partition("\n")[0]
        raise SpecError(Diagnostic(f"{which} fails on these inputs: {type(error).__name__}: {cause}")) from error
    order = list(found)
    found[""] = _tensor(result)
    return found, order


def depends(model: nn.Module, name: str, others: Iterable[str], run: Run) -> set[str]:
    """Those of the other modules, and of the whole (`""`), that a NaN in a module's output reaches."""

    def nothing(output: Tensor) -> Tensor:
        return torch.full_like(output, torch.nan) if output.is_floating_point() else output

    found: set[str] = set()

    def look(other: str) -> Replace:
        def value(output: Tensor) -> Tensor:
            if output.isnan().any():
                found.add(other)
            return output

        return value

    with _hooks(model, {name: nothing, **{other: look(other) for other in others if other != name}}):
        if _tensor(run()).isnan().any():
            found.add("")
    return found


def _hooks(model: nn.Module | None, values: dict[str, Replace]) -> ExitStack:
    """Hand on what modules return through functions of the first tensor, until the block ends."""

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

"""The first component of a step whose output, or gradient, is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tfkit.torch_private.sharding import local_part


def first_not_finite(model: nn.Module, run: Callable[[], object]) -> str | None:
    """Run a step again and describe the first value that is not finite: a weight, a module output or a gradient.

    Return None if all are finite in this process.
    """
    names: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def look(module: nn.Module, inputs: object, output: object) -> None:
            if not names and not all(bool(tensor.isfinite().all()) for tensor in _floating_tensors(output)):
                names.append(name)

        return look

    weight = broken_weight(model)
    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    if weight:
        return weight
    if names:
        return f"the output of `{names[0]}` is the first that is not finite"
    named = [(name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None]
    last = next((name for name, grad in reversed(named) if not _is_finite_here(grad)), None)
    return f"the gradient of `{last}` is not finite" if last else None


def broken_weight(model: nn.Module) -> str | None:
    """Describe the first weight that is not finite in this process; return None if all are finite."""
    broken = next((name for name, parameter in model.named_parameters() if not _is_finite_here(parameter)), None)
    return f"the weight `{broken}` is not finite" if broken else None


def _is_finite_here(tensor: Tensor) -> bool:
    """Return True if all values of the tensor in this process are finite, without waiting for other processes."""
    local = local_part(tensor)
    assert isinstance(local, Tensor)
    return bool(local.isfinite().all())


def _floating_tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _floating_tensors(item)


def is_finite(*values: Tensor) -> bool:
    """Return True if all numbers are finite."""
    return all(bool(torch.isfinite(value).all()) for value in values)

"""The first component of a step whose output, or gradient, is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


def first_not_finite(model: nn.Module, run: Callable[[], object]) -> str:
    """In words, from running a step again: the first module whose output is not finite, or the last such gradient."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def look(module: nn.Module, inputs: object, output: object) -> None:
            if not found and not all(bool(one.isfinite().all()) for one in _tensors(output)):
                found.append(name)

        return look

    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"the weight `{name}` is not finite"
    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    if found:
        return f"the output of `{found[0]}` is the first that is not finite"
    named = [(name, one.grad) for name, one in model.named_parameters() if one.grad is not None]
    last = next((name for name, grad in reversed(named) if not bool(grad.isfinite().all())), None)
    return f"the gradient of `{last}` is not finite" if last else "every output is finite, but their loss is not"


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def is_finite(*values: Tensor) -> bool:
    """True if all numbers are."""
    return all(bool(torch.isfinite(value).all()) for value in values)

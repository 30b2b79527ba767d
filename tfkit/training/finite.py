"""The first component of a step whose output, or gradient, is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tfkit.torch_private.sharding import local_part


def first_not_finite(model: nn.Module, run: Callable[[], object]) -> str | None:
    """In words, from running a step again: the first module whose output is not finite, or the last such gradient.

    None if all are finite in this process.
    """
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def look(module: nn.Module, inputs: object, output: object) -> None:
            if not found and not all(bool(one.isfinite().all()) for one in _tensors(output)):
                found.append(name)

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
    if found:
        return f"the output of `{found[0]}` is the first that is not finite"
    named = [(name, one.grad) for name, one in model.named_parameters() if one.grad is not None]
    last = next((name for name, grad in reversed(named) if not _is_finite_here(grad)), None)
    return f"the gradient of `{last}` is not finite" if last else None


def broken_weight(model: nn.Module) -> str | None:
    """In words, the first weight that is not finite in this process; None if all are."""
    found = next((name for name, one in model.named_parameters() if not _is_finite_here(one)), None)
    return f"the weight `{found}` is not finite" if found else None


def _is_finite_here(tensor: Tensor) -> bool:
    """True if the values of this process are: asking for those of others would wait for them to ask too."""
    own = local_part(tensor)
    assert isinstance(own, Tensor)
    return bool(own.isfinite().all())


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def is_finite(*values: Tensor) -> bool:
    """True if all numbers are."""
    return all(bool(torch.isfinite(value).all()) for value in values)

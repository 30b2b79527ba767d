"""AdamW (https://arxiv.org/abs/1711.05101) with weight decay only on matrices."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

import torch
from torch import fx, nn

from tfkit.arguments import Limit, checked, unknown_argument
from tfkit.nn import StackedLinear

AnyModule: TypeAlias = Annotated[nn.Module, "a module"]
Rate: TypeAlias = Annotated[float, Limit(least=0)]
FUSED = ("cpu", "cuda", "mps", "xpu")
"""Devices on which torch updates all parameters in one kernel."""


@checked
def parameter_groups(model: AnyModule, *, weight_decay: Rate = 0.1) -> list[dict[str, Any]]:
    """The parameters of a model in two groups for an optimizer, each once: those that decay, then the others.

    Matrices decay; norms, biases, embedding tables, including those of positions, and all other vectors do not. A
    matrix that is also an embedding table, as with a tied head, is a table. Frozen parameters are included: without a
    gradient they stay as they are.

    Args:
        model: a model that `tfkit.build` returned, or a module that contains it.
        weight_decay: the decay of the first group.
    """
    spared = {parameter for module in _spared(model) for parameter in module.parameters()}
    spared |= {one.bias for one in model.modules() if isinstance(one, StackedLinear) and one.bias is not None}
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        (decaying if parameter.dim() > 1 and parameter not in spared else others).append(parameter)
    return [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _spared(model: nn.Module) -> Iterator[nn.Module]:
    """Embedding tables, and weights in a slot `norm`, even if they are not vectors."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield module
        if isinstance(module, fx.GraphModule):
            components = module.meta.get("components", {})
            norms = {path for path, config in components.items() if config.slot == "norm"}
            yield from (one for path, one in module.named_modules() if path in norms)


@checked
def adamw(model: AnyModule, lr: Rate, *, weight_decay: Rate = 0.1, **options: Any) -> torch.optim.AdamW:
    """AdamW on the `parameter_groups` of a model, in one fused kernel on devices that have one.

    Args:
        model: see `parameter_groups`.
        lr: the learning rate.
        weight_decay: the decay of the first group.
        options: further arguments of `torch.optim.AdamW`: `betas`, `eps`.

    Raises:
        TypeError: torch has no such argument.
        ValueError: torch refuses the value of one, or the model has no parameters.
    """
    known = [name for name in inspect.signature(torch.optim.AdamW).parameters if name not in ("params", "weight_decay")]
    for name in options:
        if name not in known:
            raise TypeError(unknown_argument("adamw", name, [*known, "weight_decay"]))
    fused = all(one.device.type in FUSED and one.is_floating_point() for one in model.parameters())
    groups = parameter_groups(model, weight_decay=weight_decay)
    if not any(group["params"] for group in groups):
        raise ValueError("there is nothing to train: the module has no parameters")
    try:
        return torch.optim.AdamW(groups, **{"lr": lr, "fused": fused or None} | options)
    except (TypeError, ValueError, RuntimeError) as wrong:
        raise ValueError(f"torch.optim.AdamW refuses its arguments: {wrong}") from wrong

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
Rate: TypeAlias = Annotated[float, Limit(minimum=0)]
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Devices on which torch updates all parameters in one kernel."""


@checked
def parameter_groups(model: AnyModule, *, weight_decay: Rate = 0.1) -> list[dict[str, Any]]:
    """Return two parameter groups for an optimizer: parameters that decay, then all others.

    Matrices decay; norms, biases, embedding tables, including position tables, and all other vectors do not. A
    matrix that is also an embedding table, as with a tied head, is a table. Frozen parameters are included: they have
    no gradient, so they do not change.

    Args:
        model: a model that `tfkit.build` returned, or a module that contains it.
        weight_decay: the decay of the first group.
    """
    exempt = {parameter for module in _without_decay(model) for parameter in module.parameters()}
    exempt |= {
        module.bias for module in model.modules() if isinstance(module, StackedLinear) and module.bias is not None
    }
    decaying: list[nn.Parameter] = []
    constant: list[nn.Parameter] = []
    for parameter in model.parameters():
        (decaying if parameter.dim() > 1 and parameter not in exempt else constant).append(parameter)
    return [{"params": decaying, "weight_decay": weight_decay}, {"params": constant, "weight_decay": 0.0}]


def _without_decay(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose parameters never decay: embedding tables, and components in a `norm` slot."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield module
        if isinstance(module, fx.GraphModule):
            components = module.meta.get("components", {})
            norms = {path for path, config in components.items() if config.slot == "norm"}
            yield from (component for path, component in module.named_modules() if path in norms)


@checked
def adamw(model: AnyModule, lr: Rate, *, weight_decay: Rate = 0.1, **options: Any) -> torch.optim.AdamW:
    """Build AdamW on the `parameter_groups` of a model, with a fused kernel on devices that have it.

    Args:
        model: see `parameter_groups`.
        lr: the learning rate.
        weight_decay: the decay of the first group.
        options: additional arguments of `torch.optim.AdamW`, such as `betas` and `eps`.

    Raises:
        TypeError: torch has no such argument.
        ValueError: torch rejects the value of an argument, or the model has no parameters.
    """
    names = [name for name in inspect.signature(torch.optim.AdamW).parameters if name not in ("params", "weight_decay")]
    for name in options:
        if name not in names:
            raise TypeError(unknown_argument("adamw", name, [*names, "weight_decay"]))
    parameters = list(model.parameters())
    fused = all(tensor.device.type in FUSED_DEVICES and tensor.is_floating_point() for tensor in parameters)
    groups = parameter_groups(model, weight_decay=weight_decay)
    if not any(group["params"] for group in groups):
        raise ValueError("there is nothing to train: the module has no parameters")
    try:
        return torch.optim.AdamW(groups, **{"lr": lr, "fused": fused or None} | options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"torch.optim.AdamW rejects its arguments: {error}") from error

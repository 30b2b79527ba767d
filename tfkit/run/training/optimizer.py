"""AdamW (https://arxiv.org/abs/1711.05101) with weight decay only on matrices, and the parameter groups of a run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

import torch
from torch import fx, nn

from tfkit.arguments import Limit, checked, unknown_argument
from tfkit.building.builder import graph_of
from tfkit.checkpoint.selection import matches, no_match
from tfkit.nn import Linear, StackedLinear
from tfkit.run.contract import OptimizerConfig

AnyModule: TypeAlias = Annotated[nn.Module, "a module"]
Rate: TypeAlias = Annotated[float, Limit(least=0)]
FUSED = ("cpu", "cuda", "mps", "xpu")
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
    fused = all(parameter.device.type in FUSED and parameter.is_floating_point() for parameter in model.parameters())
    groups = parameter_groups(model, weight_decay=weight_decay)
    if not any(group["params"] for group in groups):
        raise ValueError("there is nothing to train: the module has no parameters")
    try:
        return torch.optim.AdamW(groups, **{"lr": lr, "fused": fused or None} | options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"torch.optim.AdamW rejects its arguments: {error}") from error


def groups_of(model: fx.GraphModule, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Group the parameters, each once, by their settings; omit groups without parameters.

    Raises `Invalid` for a rule that matches nothing.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for number, rule in enumerate(config.groups):
        if not any(matches(name, rule.match) for name in names.values()):
            message = f"no trained parameter matches `{rule.match}`"
            raise no_match(f"groups.{number}.match", message, rule.match, list(names.values()))
    matrices = {} if config.rest is None else matrices_of(model)
    of_matrices, of_rest = _settings(model, config), _settings(model, config.rest or config)
    groups: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for parameter, name in names.items():
        lr, weight_decay = (of_matrices if parameter in matrices else of_rest)[parameter]
        for rule in config.groups:
            if matches(name, rule.match):
                lr = rule.lr if rule.lr is not None else lr
                weight_decay = rule.weight_decay if rule.weight_decay is not None else weight_decay
        groups.setdefault((parameter in matrices, lr, weight_decay), []).append(parameter)
    return [
        {"params": parameters, "lr": lr, "weight_decay": decay}
        | ({"matrices": [matrices[parameter] for parameter in parameters]} if of else {})
        for (of, lr, decay), parameters in groups.items()
    ]


def matrices_of(model: fx.GraphModule) -> dict[nn.Parameter, tuple[int, ...]]:
    """Return the weights of linear layers inside the model, except heads and tables, and the rows of each matrix."""
    graph = graph_of(model)
    heads = [model.get_submodule(name) for name in graph.outputs if graph.node(name).output.type == "logits"]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    exempt = {parameter for module in (*heads, *tables) for parameter in module.parameters()}
    layers = {
        module.weight: _rows(module) for module in model.modules() if isinstance(module, nn.Linear | StackedLinear)
    }
    return {weight: layers[weight] for weight in model.parameters() if weight in layers and weight not in exempt}


def _rows(layer: nn.Linear | StackedLinear) -> tuple[int, ...]:
    parts = layer.parts if isinstance(layer, Linear | StackedLinear) else None
    rows = tuple(parts.values()) if parts else (layer.weight.size(-2),)
    return rows * (layer.weight.size(0) if isinstance(layer, StackedLinear) else 1)


def _settings(model: fx.GraphModule, config: OptimizerConfig) -> dict[nn.Parameter, tuple[float, float]]:
    """Return the learning rate and weight decay of each parameter before the rules apply."""
    groups = parameter_groups(model, weight_decay=config.weight_decay)
    return {
        parameter: (config.lr, config.weight_decay if config.decay_all else group["weight_decay"])
        for group in groups
        for parameter in group["params"]
    }

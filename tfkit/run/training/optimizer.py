"""The parameter groups of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx, nn

from tfkit.building.builder import graph_of
from tfkit.checkpoint.selection import is_match, no_match
from tfkit.errors import Invalid
from tfkit.learning.adamw import parameter_groups
from tfkit.nn import Linear, StackedLinear
from tfkit.run.contract import Factors, OptimizerConfig, Role
from tfkit.run.training.adapters import low_ranks


@dataclass(frozen=True)
class ParameterRule:
    """The role of a weight, and the factors of its settings."""

    role: Role
    factors: Factors
    """Factors of the rate, the decay and epsilon; `std` is the factor of the first matrix."""
    std: float | None
    """Standard deviation of the initial values of the first matrix; None if they are constant or not random."""
    scales: tuple[tuple[int, float], ...]
    """Rows of each matrix of the weight, and the factor of the initial values that `build` fills in."""


Rules: TypeAlias = Mapping[str, ParameterRule]
"""The rule of each parameter by its name."""


def groups_of(model: fx.GraphModule, config: OptimizerConfig, rules: Rules | None = None) -> list[dict[str, Any]]:
    """Group the parameters, each once, by their settings; omit groups without parameters.

    `rules` are the rules of a parametrization, whose factors multiply the settings. Raises `Invalid` for a group of the
    config that matches nothing.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for number, rule in enumerate(config.groups):
        if not any(is_match(name, rule.match) for name in names.values()):
            message = f"no trained parameter matches `{rule.match}`"
            raise no_match(f"groups.{number}.match", message, rule.match, list(names.values()))
    matrices = {} if config.rest is None else matrices_of(model)
    of_matrices, of_others = _default_settings(model, config), _default_settings(model, config.rest or config)
    groups: dict[tuple[bool, float, float, float | None], list[nn.Parameter]] = {}
    for parameter, name in names.items():
        of = config if parameter in matrices else config.rest or config
        lr, weight_decay = (of_matrices if parameter in matrices else of_others)[parameter]
        for rule in config.groups:
            if is_match(name, rule.match):
                lr = rule.lr if rule.lr is not None else lr
                weight_decay = rule.weight_decay if rule.weight_decay is not None else weight_decay
        eps = None
        if rules is not None:
            if name not in rules:
                raise Invalid("", f"the parametrization has no rule for `{name}`, which the spec does not describe")
            factors = rules[name].factors
            lr, weight_decay = lr * factors.lr, weight_decay * factors.weight_decay
            eps = of.eps * factors.eps if "eps" in type(of).model_fields else None  # type: ignore[attr-defined]
        groups.setdefault((parameter in matrices, lr, weight_decay, eps), []).append(parameter)
    return [
        {"params": parameters, "lr": lr, "weight_decay": decay}
        | ({"matrices": [matrices[parameter] for parameter in parameters]} if of_matrix else {})
        | ({} if eps is None else {"eps": eps})
        for (of_matrix, lr, decay, eps), parameters in groups.items()
    ]


def matrices_of(model: fx.GraphModule) -> dict[nn.Parameter, tuple[int, ...]]:
    """Return the weights of linear layers and adapters inside the model, and the rows of each matrix in a weight.

    Heads and tables are omitted.
    """
    graph = graph_of(model)
    outputs = [graph.node(name) for name in graph.outputs]
    heads = [model.get_submodule(node.module) for node in outputs if node.output.type == "logits"]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    exempt = {parameter for module in (*heads, *tables) for parameter in module.parameters()}
    layers = {
        module.weight: _matrix_rows(module)
        for module in model.modules()
        if isinstance(module, nn.Linear | StackedLinear)
    }
    layers |= {matrix: (len(matrix),) for _, module in low_ranks(model) for matrix in (module.a, module.b)}
    return {weight: layers[weight] for weight in model.parameters() if weight in layers and weight not in exempt}


def _matrix_rows(layer: nn.Linear | StackedLinear) -> tuple[int, ...]:
    parts = layer.parts if isinstance(layer, Linear | StackedLinear) else None
    rows = tuple(parts.values()) if parts else (layer.weight.size(-2),)
    return rows * (layer.weight.size(0) if isinstance(layer, StackedLinear) else 1)


def _default_settings(model: fx.GraphModule, config: OptimizerConfig) -> dict[nn.Parameter, tuple[float, float]]:
    """Return the learning rate and weight decay of each parameter before the rules apply."""
    groups = parameter_groups(model, weight_decay=config.weight_decay)
    return {
        parameter: (config.lr, config.weight_decay if config.decay_all else group["weight_decay"])
        for group in groups
        for parameter in group["params"]
    }

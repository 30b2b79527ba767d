"""The parameters of a model in groups for an optimizer, by the rules of a run."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import fx, nn

from tfkit.builder import graph_of
from tfkit.component import OptimizerConfig
from tfkit.errors import Invalid, closest
from tfkit.nn import Linear, StackedLinear
from tfkit.training.optimizer import parameter_groups


def groups_of(model: fx.GraphModule, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The parameters, each once, by their settings; groups without parameters are left out.

    Raises `Invalid` for a rule that matches nothing.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for number, rule in enumerate(config.groups):
        if not any(fnmatchcase(name, rule.match) for name in names.values()):
            message = f"no trained parameter matches `{rule.match}`"
            raise no_match(f"groups.{number}.match", message, rule.match, list(names.values()))
    matrices = {} if config.rest is None else matrices_of(model)
    own, others = _settings(model, config), _settings(model, config.rest or config)
    found: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for parameter, name in names.items():
        lr, weight_decay = (own if parameter in matrices else others)[parameter]
        for rule in config.groups:
            if fnmatchcase(name, rule.match):
                lr = rule.lr if rule.lr is not None else lr
                weight_decay = rule.weight_decay if rule.weight_decay is not None else weight_decay
        found.setdefault((parameter in matrices, lr, weight_decay), []).append(parameter)
    return [
        {"params": some, "lr": lr, "weight_decay": decay}
        | ({"matrices": [matrices[one] for one in some]} if of else {})
        for (of, lr, decay), some in found.items()
    ]


def matrices_of(model: fx.GraphModule) -> dict[nn.Parameter, tuple[int, ...]]:
    """The weights of linear layers inside the model, not of heads or tables, with the rows of each matrix in them."""
    graph = graph_of(model)
    heads = [model.get_submodule(name) for name in graph.outputs if graph.node(name).output.type == "logits"]
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding)]
    spared = {parameter for module in (*heads, *tables) for parameter in module.parameters()}
    layers = {one.weight: _rows(one) for one in model.modules() if isinstance(one, nn.Linear | StackedLinear)}
    return {one: layers[one] for one in model.parameters() if one in layers and one not in spared}


def _rows(layer: nn.Linear | StackedLinear) -> tuple[int, ...]:
    parts = layer.parts if isinstance(layer, Linear | StackedLinear) else None
    rows = tuple(parts.values()) if parts else (layer.weight.size(-2),)
    return rows * (layer.weight.size(0) if isinstance(layer, StackedLinear) else 1)


def _settings(model: fx.GraphModule, config: OptimizerConfig) -> dict[nn.Parameter, tuple[float, float]]:
    """The rate and the decay of each parameter, rules aside."""
    groups = parameter_groups(model, weight_decay=config.weight_decay)
    return {
        parameter: (config.lr, config.weight_decay if config.decay_all else group["weight_decay"])
        for group in groups
        for parameter in group["params"]
    }


def no_match(field: str, message: str, pattern: str, names: Sequence[str]) -> Invalid:
    """The error of a pattern that matches none of these names."""
    words = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    parts = [part.strip("*") for part in pattern.split(".") if part.strip("*")]
    near = next((found for part in parts if part not in words and (found := closest(part, words))), None)
    help = (
        f"a component with a similar name exists: `{near}`"
        if near
        else f"names are such as `{names[-1]}`"
        if names
        else None
    )
    return Invalid(field, message, help=help)

"""The parameters of a model in groups for an optimizer, by the rules of a run."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import fx, nn

from tfkit.component import OptimizerConfig
from tfkit.errors import Invalid, closest
from tfkit.training.optimizer import parameter_groups


def groups_of(model: fx.GraphModule, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The parameters, each once, by their settings; groups without parameters are left out.

    Raises `Invalid` for a rule that matches nothing.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for number, rule in enumerate(config.groups):
        if not any(fnmatchcase(name, rule.match) for name in names.values()):
            message = f"no parameter that is trained matches `{rule.match}`"
            raise no_match(f"groups.{number}.match", message, rule.match, list(names.values()))
    decay = dict.fromkeys(names, config.weight_decay) if config.decay_all else _decays(model, config.weight_decay)
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter, name in names.items():
        lr, weight_decay = config.lr, decay[parameter]
        for rule in config.groups:
            if fnmatchcase(name, rule.match):
                lr = rule.lr if rule.lr is not None else lr
                weight_decay = rule.weight_decay if rule.weight_decay is not None else weight_decay
        found.setdefault((lr, weight_decay), []).append(parameter)
    return [{"params": some, "lr": lr, "weight_decay": decay} for (lr, decay), some in found.items()]


def _decays(model: fx.GraphModule, weight_decay: float) -> dict[nn.Parameter, float]:
    return {
        parameter: group["weight_decay"]
        for group in parameter_groups(model, weight_decay=weight_decay)
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

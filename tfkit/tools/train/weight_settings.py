"""The settings of each weight under the parametrization of a run: role, rate, decay, epsilon, and initial values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tfkit.building.builder import build
from tfkit.component import AttentionConfig, parts
from tfkit.run.checked_run import Run
from tfkit.run.parametrization import depth_ratio, width_ratio
from tfkit.run.training.optimizer import groups_of
from tfkit.run.training.parametrize import parameter_rules

NOT_COVERED = "no rule covers `clip`, the batch size and the length of training: tune them at the sizes of the run"


@dataclass(frozen=True)
class WeightSettings:
    """The settings of a weight.

    Attributes:
        shape: its axes.
        role: the role in the parametrization, from the axes that grow.
        lr: the learning rate before the schedule.
        weight_decay: the decay.
        eps: epsilon of the optimizer; None for an optimizer without it.
        std: the standard deviation of its initial values, of its first matrix if several are fused; None for constants.
    """

    shape: tuple[int, ...]
    role: str
    lr: float
    weight_decay: float
    eps: float | None
    std: float | None


@dataclass(frozen=True)
class SettingsGroup:
    """Weights of a role with equal settings of the optimizer.

    Attributes:
        role: their role.
        weights: their number.
        parameters: the number of their values.
        lr: the learning rate before the schedule.
        weight_decay: the decay.
        eps: epsilon of the optimizer; None for an optimizer without it.
        std: the smallest and the largest standard deviation of initial values; None if all values are constants.
    """

    role: str
    weights: int
    parameters: int
    lr: float
    weight_decay: float
    eps: float | None
    std: tuple[float, float] | None


def weight_settings(run: Run) -> dict[str, WeightSettings]:
    """Return the settings of each trained weight by its name; nothing for a run without base sizes."""
    rules = parameter_rules(run)
    if rules is None:
        return {}
    model = build(run.graph, device="meta")
    names = {parameter: name for name, parameter in model.named_parameters()}
    with run.guarded(run.config.optimizer, "`build`", "optimizer"):
        groups = groups_of(model, run.config.optimizer, rules)
    settings = {
        names[parameter]: (group["lr"], group["weight_decay"], group.get("eps"))
        for group in groups
        for parameter in group["params"]
    }
    return {
        name: WeightSettings(tuple(model.get_parameter(name).shape), rule.role, *settings[name], rule.std)
        for name, rule in rules.items()
        if name in settings
    }


def settings_groups(settings: dict[str, WeightSettings]) -> tuple[SettingsGroup, ...]:
    """Return the groups of weights with equal roles and equal settings of the optimizer."""
    groups: dict[tuple[str, float, float, float | None], list[WeightSettings]] = {}
    for weight in settings.values():
        groups.setdefault((weight.role, weight.lr, weight.weight_decay, weight.eps), []).append(weight)
    result = []
    for (role, lr, weight_decay, eps), members in groups.items():
        deviations = [weight.std for weight in members if weight.std is not None]
        std = (min(deviations), max(deviations)) if deviations else None
        count = sum(math.prod(weight.shape) for weight in members)
        result.append(SettingsGroup(role, len(members), count, lr, weight_decay, eps, std))
    return tuple(result)


def spec_factors(run: Run) -> dict[str, float]:
    """Return the numbers that the parametrization sets in the spec of the model, by path."""
    written, trained = (dict(parts((), spec.model)) for spec in (run.written, run.graph.spec))
    return {
        ".".join(path).removeprefix("graph."): value
        for path, value in trained.items()
        if isinstance(value, float) and written.get(path) != value and path[-1] != "scale_onto"
    }


def stack_growth(run: Run) -> dict[str, dict[str, float]]:
    """Return the ratios of each stack to the base sizes by node: width, depth, number of heads, and their width."""
    growth: dict[str, dict[str, float]] = {}
    small = run.base_graph
    if small is None:
        return growth
    for node in run.graph.nodes:
        base = small.node(node.name)
        if node.stack is None or base.stack is None:
            continue
        ratios = growth[node.name] = {"width": width_ratio(node, base), "depth": depth_ratio(node, base)}
        pairs = [
            (step.config, before.config)
            for layer in node.stack.layers
            for twin in base.stack.layers
            if twin.name == layer.name
            for step, before in zip(layer.steps, twin.steps, strict=True)
        ]
        for config, before in pairs:
            if isinstance(config, AttentionConfig) and isinstance(before, AttentionConfig):
                ratios["heads"] = config.n_heads / before.n_heads
                ratios["width of heads"] = config.score_width / before.score_width
    return growth

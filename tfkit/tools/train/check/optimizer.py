"""Properties of an optimizer: the settings of its groups, its decay, its formula, and the effect of its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial

import numpy as np
import torch
from torch import Tensor, fx, nn

from tfkit.building.builder import graph_of
from tfkit.building.initialize import generator_of
from tfkit.checkpoint.selection import is_match
from tfkit.nn import Linear, StackedLinear
from tfkit.run.contract import GroupConfig, OptimizerConfig
from tfkit.run.parametrization import with_factors
from tfkit.run.training.optimizer import groups_of
from tfkit.run.training.parametrize import rules_of
from tfkit.spec.messages import kind_of
from tfkit.tools.check.measure import Deviation, property_of, require, without_formula
from tfkit.tools.train.check.run_under_test import RunUnderTest, copied_tensors

FACTORS = (1.0, 0.5, 0.8, 0.3, 0.6)
"""Factors of the learning rate at the steps of a check: they differ, so the rate must be read at each step."""
DECAY = 0.1
"""The decay of a check if a run has none."""
EXACT_TOLERANCE, ITERATED_TOLERANCE = 1e-7, 5e-2
"""Largest errors of a displacement: in float64, and for optimizers of matrices, which iterate in half precision."""


@property_of("groups", "trains each weight at the rate of its group", of="run")
def group_settings(subject: RunUnderTest) -> Iterator[Deviation]:
    """Each trained weight is in one group, with the settings of its rules. At the learning rate 0 no weight moves."""
    config, model = _tested_optimizer(subject), subject.new_model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = config.build(groups_of(model, config))
    settings: dict[str, list[tuple[float, float]]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            settings.setdefault(names[parameter], []).append((group["lr"], group["weight_decay"]))
    for name, expected in settings_of(model, config).items():
        if settings.get(name) != [expected]:
            got = " and ".join("lr {:g}, weight_decay {:g}".format(*pair) for pair in settings.get(name, [])) or "none"
            setting = "lr {:g}, weight_decay {:g}".format(*expected)
            yield Deviation.fault(f"`{name}` must be in one group with {setting}; got {got}", _optimizer_label(config))
    for name in settings.keys() - settings_of(model, config).keys():
        yield Deviation.fault(f"`{name}` is frozen, but in a group of the optimizer", _optimizer_label(config))
    for name, moved in weight_displacements(subject, _without_decay(config), (0.0,)).items():
        detail = f"`{name}` moves by {{:.1e}} at the learning rate 0: the optimizer must use `lr` of its group"
        yield _size_deviation(moved, detail, 0.0, config)


@property_of("decay", "decays weights as their groups say", of="run", follows=("groups",))
def decay_effect(subject: RunUnderTest) -> Iterator[Deviation]:
    """`weight_decay` changes the step of exactly the weights whose group sets it.

    Without a reference, decay must shrink a weight by decay times rate, or act as decay times weight in the gradient.
    """
    config, model = _tested_optimizer(subject), subject.new_model()
    settings, before = settings_of(model, config), dict(model.named_parameters())
    step = partial(weight_displacements, subject, factors=(1.0,))
    decayed, plain = step(config), step(_without_decay(config))
    in_gradient = step(_without_decay(config), further={n: d * before[n].detach() for n, (_, d) in settings.items()})
    for name, (rate, expected) in settings.items():
        effect, of = decayed[name] - plain[name], _optimizer_of(model, config, name)
        if not expected:
            detail = f"`{name}` decays, although its group has `weight_decay: 0`: a step changes by {{:.1e}}"
            yield _size_deviation(effect, detail, 0.0, of)
        elif not effect.any():
            yield Deviation.fault(
                f"`{name}` does not decay: `weight_decay` of its group has no effect", _optimizer_label(of)
            )
        elif of.kind_name() not in subject.functions["optimizer"]:
            weight = before[name].detach()
            separate = effect + rate * expected * weight
            added = decayed[name] - in_gradient[name]
            error = min(float(part.abs().max() / (rate * expected * weight).abs().max()) for part in (separate, added))
            fraction = -float((effect * weight).sum() / weight.square().sum())
            detail = (
                f"`weight_decay` {expected:g} at the learning rate {rate:g} must shrink `{name}` by {rate * expected:g}"
                f" of itself in a step, or act as {expected:g} times the weight in its gradient; it shrinks it by"
                f" {fraction:.4g}"
            )
            yield Deviation(error, detail, EXACT_TOLERANCE, _optimizer_label(of))
    yield Deviation(0.0, "")


@property_of(
    "optimizer",
    "updates weights as its formula does",
    of="run",
    follows=("groups",),
    compares=lambda subject: "the optimizer",
)
def optimizer_formula(subject: RunUnderTest) -> Iterator[Deviation]:
    """Five steps of at least three groups equal the reference, in float64."""
    config, model = _tested_optimizer(subject), subject.new_model()
    functions = subject.functions["optimizer"]
    missing = [of.kind_name() for of in (config, config.rest) if of is not None and of.kind_name() not in functions]
    require(not missing, without_formula(("optimizer", kind) for kind in missing))
    moved = weight_displacements(subject, config, FACTORS)
    for name, (rate, weight_decay) in settings_of(model, config).items():
        parameter, of = model.get_parameter(name).detach(), _optimizer_of(model, config, name)
        gradients = [_random_gradient(subject, name, parameter, step) for step in range(len(FACTORS))]
        alone = of is config and config.rest is not None
        parts = [_weight_matrices(model, name, tensor) if alone else [tensor] for tensor in (parameter, *gradients)]
        rates = [rate * factor for factor in FACTORS]
        after = [
            functions[of.kind_name()](of, weight.numpy(), [part.numpy() for part in of_steps], rates, weight_decay)
            for weight, *of_steps in zip(*parts, strict=True)
        ]
        expected = np.concatenate([array.reshape(-1) for array in after]) - parameter.numpy().reshape(-1)
        size = float(np.abs(expected).max())
        error = float(np.abs(moved[name].numpy().reshape(-1) - expected).max()) / size
        limit = ITERATED_TOLERANCE if alone else EXACT_TOLERANCE
        detail = f"{len(FACTORS)} steps of `{name}` differ from the formula by {error:.1e} of their size"
        yield Deviation(error, detail, limit, _optimizer_label(of))


@property_of("parametrization", "is unchanged by its parametrization at the base sizes", of="run")
def base_settings(subject: RunUnderTest) -> Iterator[Deviation]:
    """At its base sizes, a parametrization sets no value of the spec, and all of its factors are 1."""
    run, config = subject.full, subject.full.config.parametrization
    base = run.base_graph
    require(base is not None, "the run has no base sizes")
    assert base is not None
    scaled = with_factors(config, base.spec, base.spec)
    label = f"parametrization `{config.kind_name()}`"
    if scaled.model != base.spec.model:
        yield Deviation.fault("the factors of the forward pass must be 1 at the base sizes", label)
    for name, rule in rules_of(config, run.config.optimizer, base, base).items():
        factors = [*astuple(rule.factors), *(scale for _, scale in rule.scales)]
        error = max(abs(factor - 1) for factor in factors)
        yield Deviation(
            error, f"a factor of `{name}` must be 1 at the base sizes; it differs by {error:.1e}", 0.0, label
        )


# ---- the configs of a check ----


def _tested_optimizer(subject: RunUnderTest) -> OptimizerConfig:
    """Return the optimizer of the run with weight decay, and with two additional rules for the last matrix."""
    config, trained = subject.run.config.optimizer, _trained_weights(subject.new_model())
    name = [name for name, parameter in trained.items() if parameter.dim() > 1][-1]
    rules = (
        GroupConfig(match=name, lr=config.lr / 2, weight_decay=3 * DECAY),
        GroupConfig(match=name, lr=config.lr / 4),
    )
    return with_decay(config).model_copy(update={"groups": (*config.groups, *rules)})


def with_decay(config: OptimizerConfig) -> OptimizerConfig:
    """Return an optimizer whose matrices decay, and the optimizer in its fields likewise."""
    inside = {name: with_decay(value) for name, value in config if isinstance(value, OptimizerConfig)}
    return config.model_copy(update={"weight_decay": config.weight_decay or DECAY, **inside})


def _without_decay(config: OptimizerConfig) -> OptimizerConfig:
    inside = {name: _without_decay(value) for name, value in config if isinstance(value, OptimizerConfig)}
    rules = tuple(rule.model_copy(update={"weight_decay": rule.weight_decay and 0.0}) for rule in config.groups)
    return config.model_copy(update={"weight_decay": 0.0, "groups": rules, **inside})


def _optimizer_label(config: OptimizerConfig) -> str:
    return f"{kind_of(type(config))} `{config.kind_name()}`"


def _optimizer_of(model: fx.GraphModule, config: OptimizerConfig, name: str) -> OptimizerConfig:
    """Return the optimizer of a weight."""
    return config if config.rest is None or _is_matrix(model, name) else config.rest


# ---- the documented settings of a weight ----


def _trained_weights(model: fx.GraphModule) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def settings_of(model: fx.GraphModule, config: OptimizerConfig) -> dict[str, tuple[float, float]]:
    """Return the learning rate and the decay of each weight that is trained: the last rule that sets one applies."""
    settings = {}
    for name in _trained_weights(model):
        of = _optimizer_of(model, config, name)
        rate, weight_decay = of.lr, of.weight_decay if of.decay_all or _may_decay(model, name) else 0.0
        for rule in config.groups:
            if is_match(name, rule.match):
                rate = rate if rule.lr is None else rule.lr
                weight_decay = weight_decay if rule.weight_decay is None else rule.weight_decay
        settings[name] = (rate, weight_decay)
    return settings


def _may_decay(model: fx.GraphModule, name: str) -> bool:
    """Return True for weights of at least two axes that are no table, no bias and not part of a norm."""
    of_norms = (f"{path}." for path, part in model.meta["components"].items() if part.slot == "norm")
    table = isinstance(_owner_module(model, name), nn.Embedding)
    return model.get_parameter(name).dim() > 1 and not (
        table or name.endswith(".bias") or name.startswith(tuple(of_norms))
    )


def _is_matrix(model: fx.GraphModule, name: str) -> bool:
    """Return True for the weight of a linear layer that is neither a head nor a table."""
    node = graph_of(model).node(name.partition(".")[0])
    head = node.name in graph_of(model).outputs and node.output.type == "logits"
    return isinstance(_owner_module(model, name), nn.Linear | StackedLinear) and name.endswith(".weight") and not head


def _owner_module(model: fx.GraphModule, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _weight_matrices(model: fx.GraphModule, name: str, tensor: Tensor) -> list[Tensor]:
    """Return the matrices in a tensor of the shape of a weight: each expert of a stack, each part of a fused layer."""
    owner = _owner_module(model, name)
    sizes = [*owner.parts.values()] if isinstance(owner, Linear | StackedLinear) and owner.parts else [tensor.size(-2)]
    experts = tensor.unbind() if tensor.dim() > 2 else (tensor,)
    return [part for expert in experts for part in expert.split(sizes)]


# ---- steps of an optimizer alone ----


def _random_gradient(subject: RunUnderTest, name: str, parameter: Tensor, step: int) -> Tensor:
    """Return a random gradient, the same for a name and a step."""
    generator = generator_of(subject.seed, f"{name}.gradient.{step}", "cpu")
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def weight_displacements(
    subject: RunUnderTest,
    config: OptimizerConfig,
    factors: Sequence[float],
    further: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return how far steps with random gradients move each weight, in float64.

    Args:
        subject: the run.
        config: its optimizer.
        factors: the factor of the learning rates at each step.
        further: added to the gradients, by name.
    """
    model = subject.new_model()
    before, optimizer = copied_tensors(_trained_weights(model)), config.build(groups_of(model, config))
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, factor in enumerate(factors):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        for name, parameter in _trained_weights(model).items():
            parameter.grad = _random_gradient(subject, name, parameter, step)
            if further is not None:
                parameter.grad += further[name]
        optimizer.step()
    return {name: parameter.detach() - before[name] for name, parameter in _trained_weights(model).items()}


def _size_deviation(moved: Tensor, detail: str, limit: float, config: OptimizerConfig) -> Deviation:
    size = float(moved.abs().max())
    return Deviation(size, detail.format(size), limit, _optimizer_label(config))

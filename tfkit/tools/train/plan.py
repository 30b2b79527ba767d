"""A run before it runs: its length, its cost, its learning rates, and the scores of constant answers.

The utilisation of a device is the fraction of its matrix products per second that a run used
(https://arxiv.org/abs/2204.02311, appendix B).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch

from tfkit.building.builder import build
from tfkit.building.edits import MeasuredModel
from tfkit.plugin.manager import Plugins
from tfkit.run.checked_run import Run, mean_length
from tfkit.run.contract import IGNORE_INDEX, Batch, MetricConfig
from tfkit.run.training.adapters import adapters_description, insert_adapters
from tfkit.run.training.layers import matrices_in_float8
from tfkit.run.training.order import indices_of
from tfkit.tools.common.modes import Optimizer
from tfkit.tools.cost.cost import Cost, cost
from tfkit.tools.cost.devices import Device, device_of_driver
from tfkit.tools.train.weight_settings import (
    SettingsGroup,
    settings_groups,
    spec_factors,
    stack_growth,
    weight_settings,
)

POINTS = 5
PADDING_EXAMPLES = 1024
"""The number of examples of a batch whose padding is counted: more change the result little, and each must be read."""


@dataclass(frozen=True)
class Plan:
    """The size of a run.

    Attributes:
        name: the name of the run.
        digest: the digest of the run.
        parameters: the number of parameters of the model, including adapters.
        trained: the number of parameters of the adapters, which alone are trained; None without adapters.
        steps: the number of steps.
        tokens: the total number of positions that the steps train on, without padding.
        padding: the number of positions of padding in addition to `tokens`, predicted from the batches of five steps.
        epochs: the length of the run in epochs of the training split.
        flops: FLOPs of all steps, forward and backward, without padding.
        flops_of_evaluations: FLOPs of all evaluations, which are a forward pass for every example, and for every
            continuation of a task.
        memory: the predicted peak memory of a step, in bytes. An evaluation needs no more. If a step has several
            micro-batches, this is an upper bound: the gradients of the earlier micro-batches are in memory. Examples
            of unequal lengths count as examples of the maximum length.
        seconds: the minimum time of all steps on the device, without padding; None if its limits are not known.
        float8: the matrices that steps multiply in float8; None without `machine.float8`.
        rates: the learning rate at five steps, before a parametrization.
        groups: the weights by role and settings; empty without base sizes.
        growth: the ratios of each stack to the base sizes.
        factors: the numbers that the parametrization sets in the spec of the model, by path.
    """

    name: str
    digest: str
    parameters: int
    trained: int | None
    steps: int
    tokens: int
    padding: int
    epochs: float
    flops: int
    flops_of_evaluations: int
    memory: int
    seconds: float | None
    float8: str | None
    rates: tuple[tuple[int, float], ...]
    groups: tuple[SettingsGroup, ...]
    growth: Mapping[str, Mapping[str, float]]
    factors: Mapping[str, float]


def run_plan(run: Run, device: Device | None = None) -> Plan:
    """Return the size of a run, with its least time on a device, by default the run's device.

    Only the costs are computed.
    """
    config, model = run.config, trained_model(run)
    micro, lengths = config.micro_batch, {run.longest, run.length, *run.examples_by_length}
    costs = {length: _cost_of_step(run, model, length, torch.float32) for length in lengths}
    longest, total = costs[run.longest], costs[run.length].total
    windows = run.data.examples("train", "sequential")
    return Plan(
        name=config.name,
        digest=run.digest,
        parameters=total.parameters,
        trained=trained_parameters(model),
        steps=run.steps,
        tokens=round(run.tokens_before(run.steps + 1)),
        padding=round(run.steps * run.tokens_of_step * padding_of(run)),
        epochs=run.sizes.before(run.steps + 1) / len(windows),
        flops=round(sum(n / micro * costs[length].total.flops for length, n in run.examples_by_length.items())),
        flops_of_evaluations=round(_evaluated_examples(run) / micro * total.flops_forward),
        memory=longest.peak + (longest.memory.gradients if config.batch.largest > micro else 0),
        seconds=_minimum_seconds(run, model, costs, device or device_of_run(run)),
        float8=config.machine.float8 and matrices_in_float8(build(run.graph, device="meta"), run)[1],
        rates=tuple((step, config.optimizer.lr * run.factor(step)) for step in _sampled_steps(run)),
        groups=settings_groups(weight_settings(run)),
        growth=stack_growth(run),
        factors=spec_factors(run),
    )


def trained_model(run: Run) -> MeasuredModel:
    """Return the model of a run as its steps train it: with its adapters, which then alone have gradients."""
    if run.config.adapters is None:
        return MeasuredModel(run.graph)
    model = build(run.graph, device="meta")
    insert_adapters(model, run)
    return MeasuredModel(run.graph, model, (f"adapters inserted, {adapters_description(model)}",))


def trained_parameters(model: MeasuredModel) -> int | None:
    """Return the number of parameters of adapters; None for a model without adapters."""
    if model.module is None:
        return None
    return sum(parameter.numel() for parameter in model.module.parameters() if parameter.requires_grad)


def _sampled_steps(run: Run) -> list[int]:
    """Return evenly spaced steps, including the first and the last."""
    return sorted({1 + (run.steps - 1) * point // (POINTS - 1) for point in range(POINTS)})


def padding_of(run: Run) -> float:
    """Return the number of positions of padding for each position without, in the batches of five steps.

    Of a larger batch, `PADDING_EXAMPLES` examples are read.
    """
    config, examples = run.config, run.data.examples("train", run.config.data.order)
    n_tokens = n_positions = 0
    for step in _sampled_steps(run):
        indices = indices_of(config.data.order, config.seed, step, run.sizes, examples=len(examples))
        indices = indices[:PADDING_EXAMPLES]
        batch = run.cut(examples.batch(indices), step)
        shapes = {name: values.shape[:2] for name, values in batch.inputs.items()}
        sizes = [batch.masks.get(name, np.ones(shape)).sum(1) for name, shape in shapes.items()]
        n_tokens += int(np.max(sizes, axis=0).sum())
        n_positions += len(indices) * max(length for _, length in shapes.values())
    return n_positions / n_tokens - 1 if n_tokens else 0.0


def _evaluated_examples(run: Run) -> float:
    """Return the number of examples in all evaluations of a run, in units of `Run.length` positions."""
    config = run.config.eval
    if config is None:
        return 0
    times = 1 + -(-run.steps // config.every)
    batch = run.config.batch.largest
    examples = (
        (len(run.data.examples(split, "sequential")) if part.batches == "all" else part.batches * batch)
        * float(run.parts(mean_length(run.data, split)))
        for split, part in config.splits.items()
    )
    return times * (sum(examples) + sum(task.positions for task in run.tasks) / run.length)


def states_of(run: Run) -> Optimizer:
    """Return the optimizer's states as `cost` names them; AdamW's states for an unknown optimizer."""
    optimizer = run.config.optimizer
    if optimizer.kind_name() != "sgd":
        return "adamw"
    return "sgd_momentum" if optimizer.material().get("momentum") else "sgd"


def _cost_of_step(run: Run, model: MeasuredModel, length: int, dtype: torch.dtype | str) -> Cost:
    """Return the cost of a forward and backward pass of a micro-batch, and of an update."""
    return cost(model, batch=run.config.micro_batch, length=length, dtype=dtype, optimizer=states_of(run))


def _minimum_seconds(run: Run, model: MeasuredModel, costs: Mapping[int, Cost], device: Device | None) -> float | None:
    """Return the minimum time of all steps on a device, from the costs by length; None if its limits are not known."""
    if device is None:
        return None
    seconds = 0.0
    for length, examples in run.examples_by_length.items():
        precision = run.config.precision
        of_step = costs[length] if precision == "float32" else _cost_of_step(run, model, length, precision)
        seconds += examples / run.config.micro_batch * replace(of_step, dtype=run.config.fastest).floor(device).seconds
    return seconds


@dataclass(frozen=True)
class Utilisation:
    """Fraction of the device's peak FLOPs that the model used. Recomputed FLOPs do not count.

    Attributes:
        causal: without the query-key pairs that a mask hides.
        full: with these pairs.
    """

    causal: float
    full: float


def device_of_run(run: Run) -> Device | None:
    """Return the device of a run; None if its limits are not known."""
    name = run.config.machine.device
    if not name.startswith("cuda") or not torch.cuda.is_available():
        return None
    device = device_of_driver(torch.cuda.get_device_name(name))
    return device if device is not None and run.config.fastest in device.tera_flops else None


def device_utilisation(run: Run, tokens_per_second: float, device: Device | None) -> Utilisation | None:
    """Return the utilisation of a device at `tokens_per_second`.

    Return None if the device is not known, and if the length of the examples changes by step.
    """
    if device is None or len(run.examples_by_length) > 1:
        return None
    precision = run.config.precision
    total = cost(trained_model(run), batch=1, length=run.length, dtype=precision).total
    examples = tokens_per_second / float(mean_length(run.data)) * run.fill
    share = examples / device.flops(precision)
    full = total.flops_forward + total.flops_backward
    return Utilisation(causal=(total.visible_forward + total.visible_backward) * share, full=full * share)


CONSTANTS = ("constant_accuracy", "constant_exact_match")
MAX_EXAMPLES, AT_ONCE = 10_000, 500
"""Maximum number of examples to read from a split, and the number to read at a time."""


def metric_floors(run: Run, plugins: Plugins) -> dict[str, float]:
    """Return the floors of each split whose examples are questions with answers, as `test.constant_accuracy`."""
    values: dict[str, float] = {}
    kinds = plugins.registry.kinds("metric")
    for split in run.data.splits:
        examples = run.data.examples(split, "sequential")
        numbers = np.arange(min(len(examples), MAX_EXAMPLES))
        if split == "train" or not _has_answers(examples.batch(numbers[:AT_ONCE])):
            continue
        for name in CONSTANTS:
            config = kinds[name].config()
            assert isinstance(config, MetricConfig)
            metric = config.build(run.data)
            starts = range(0, len(numbers), AT_ONCE)
            batches = (torch.from_numpy(examples.batch(numbers[start : start + AT_ONCE]).ids) for start in starts)
            rows = (targets.view(len(targets), -1) for targets in batches)
            sums = reduce(operator.add, (metric.sums(targets, targets) for targets in rows))
            values[f"{split}.{name}"] = metric.compute(sums)
    return values


def _has_answers(batch: Batch) -> bool:
    """Return True if every example ends with an answer, and all answers start at the same position."""
    if not batch.has_ids:
        return False
    counted = (batch.ids != IGNORE_INDEX).reshape(batch.size, -1)
    start = int(counted[0].argmax())
    asked = start > 0 or len(batch.inputs) > 1 or batch.ids.ndim == 1
    return asked and bool(counted[:, start:].all()) and not bool(counted[:, :start].any())

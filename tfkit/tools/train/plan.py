"""A run before it runs: its length, its cost, and the learning rate on its way."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tfkit.graph.run import Run
from tfkit.tools.common.choices import Optimizer
from tfkit.tools.cost.count import cost
from tfkit.tools.cost.devices import Device
from tfkit.tools.cost.result import Cost
from tfkit.tools.train.utilisation import known_device

POINTS = 5


@dataclass(frozen=True)
class Plan:
    """The size of a run.

    Attributes:
        name: the name of the run.
        digest: the digest of its meaning.
        parameters: the number of parameters of the model.
        steps: updates.
        tokens: positions that are read in all.
        passes: passes over the training split, each position once.
        flops: of all steps, forward and backward.
        flops_of_evaluations: of all evaluations: a forward pass of every example that they read.
        memory: the largest number of bytes in use in a step, as predicted. An evaluation needs no more. If a step has
            several micro-batches, this is an upper bound: the gradients of the earlier micro-batches are in memory.
        seconds: the least time of all steps on the device; None where its limits are not known.
        rates: the learning rate at five steps.
    """

    name: str
    digest: str
    parameters: int
    steps: int
    tokens: int
    passes: float
    flops: int
    flops_of_evaluations: int
    memory: int
    seconds: float | None
    rates: tuple[tuple[int, float], ...]


def plan(run: Run, device: Device | None = None) -> Plan:
    """Return the size of a run, with its least time on a device, by default the run's device.

    Only the costs are computed.
    """
    config = run.config
    micro = config.micro_batch
    parts = config.batch.sequences / micro
    costs = cost(run.graph, batch=micro, length=run.data.length, dtype=torch.float32, optimizer=_states(run))
    total = costs.total
    windows = run.data.examples("train", "sequential")
    return Plan(
        name=config.name,
        digest=run.digest,
        parameters=total.parameters,
        steps=run.steps,
        tokens=run.steps * run.tokens_of_step,
        passes=run.steps * config.batch.sequences / len(windows),
        flops=round(run.steps * parts * (total.flops_forward + total.flops_backward)),
        flops_of_evaluations=round(_evaluated(run) / micro * total.flops_forward),
        memory=costs.peak + (costs.memory.gradients if parts > 1 else 0),
        seconds=_seconds(run, parts, costs, device or known_device(run)),
        rates=tuple((step, config.optimizer.lr * run.factor(step)) for step in _points(run)),
    )


def _points(run: Run) -> list[int]:
    """Return steps from the first to the last."""
    return sorted({1 + (run.steps - 1) * point // (POINTS - 1) for point in range(POINTS)})


def _evaluated(run: Run) -> int:
    """Return the number of examples that all evaluations of a run read."""
    config = run.config.eval
    if config is None:
        return 0
    times = 1 + -(-run.steps // config.every)
    batch = run.config.batch.sequences
    examples = (
        len(run.data.examples(split, "sequential")) if part.batches == "all" else part.batches * batch
        for split, part in config.splits.items()
    )
    return times * sum(examples)


def _states(run: Run) -> Optimizer:
    """Return the optimizer's states as `cost` names them; AdamW's states for an unknown optimizer."""
    optimizer = run.config.optimizer
    if optimizer.kind_name() != "sgd":
        return "adamw"
    return "sgd_momentum" if optimizer.material().get("momentum") else "sgd"


def _seconds(run: Run, parts: float, costs: Cost, device: Device | None) -> float | None:
    """Return the least time of all steps on a device whose limits are known."""
    if device is None:
        return None
    precision, micro = run.config.precision, run.config.micro_batch
    if precision != "float32":
        costs = cost(run.graph, batch=micro, length=run.data.length, dtype=precision, optimizer=_states(run))
    return run.steps * parts * costs.floor(device).seconds

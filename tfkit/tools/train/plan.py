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
        name: that of the run.
        digest: the digest of its meaning.
        parameters: those of the model.
        steps: updates.
        tokens: positions that are read in all.
        passes: passes over the training split, each position once.
        flops: of all steps, forward and backward.
        flops_of_evaluations: of all evaluations: a forward pass of every example that they read.
        memory: the largest number of bytes in use in a step, as predicted. An evaluation needs no more.
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
    """The size of a run, with its least time on a device: its own unless given. Nothing is computed but its costs."""
    config = run.config
    micro = config.micro_batch
    parts = config.batch.sequences / micro
    found = cost(run.graph, batch=micro, length=run.data.length, dtype=torch.float32, optimizer=_states(run))
    one = found.total
    windows = run.data.examples("train", "sequential")
    return Plan(
        name=config.name,
        digest=run.digest,
        parameters=one.parameters,
        steps=run.steps,
        tokens=run.steps * run.tokens_of_step,
        passes=run.steps * config.batch.sequences / len(windows),
        flops=round(run.steps * parts * (one.flops_forward + one.flops_backward)),
        flops_of_evaluations=round(_evaluated(run) / micro * one.flops_forward),
        memory=found.peak,
        seconds=_seconds(run, parts, found, device or known_device(run)),
        rates=tuple((step, config.optimizer.lr * config.schedule.factor(step, run.steps)) for step in _points(run)),
    )


def _points(run: Run) -> list[int]:
    """Steps from the first to the last."""
    return sorted({1 + (run.steps - 1) * point // (POINTS - 1) for point in range(POINTS)})


def _evaluated(run: Run) -> int:
    """The number of examples that all evaluations of a run read."""
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
    """The states of the optimizer as `cost` knows them: those of AdamW for one that it does not."""
    optimizer = run.config.optimizer
    if optimizer.kind_name() != "sgd":
        return "adamw"
    return "sgd_momentum" if optimizer.material().get("momentum") else "sgd"


def _seconds(run: Run, parts: float, found: Cost, device: Device | None) -> float | None:
    """The least time of all steps on a device whose limits are known."""
    if device is None:
        return None
    precision, micro = run.config.precision, run.config.micro_batch
    if precision != "float32":
        found = cost(run.graph, batch=micro, length=run.data.length, dtype=precision, optimizer=_states(run))
    return run.steps * parts * found.floor(device).seconds

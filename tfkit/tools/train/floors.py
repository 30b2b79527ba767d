"""The scores of the best constant answer: a model that is not above them has learned nothing of the task."""

from __future__ import annotations

import operator
from functools import reduce

import numpy as np
import torch

from tfkit.plugin.manager import Plugins
from tfkit.run.checked_run import Run
from tfkit.run.contract import IGNORED, Batch, MetricConfig

METRICS = ("constant_accuracy", "constant_exact_match")
MOST, AT_ONCE = 10_000, 500
"""Examples that are read of a split, and together."""


def floors(run: Run, plugins: Plugins) -> dict[str, float]:
    """Return the floors of each split whose examples are questions with answers, as `test.constant_accuracy`."""
    values: dict[str, float] = {}
    kinds = plugins.registry.kinds("metric")
    for split in run.data.splits:
        examples = run.data.examples(split, "sequential")
        numbers = np.arange(min(len(examples), MOST))
        if split == "train" or not _has_answers(examples.batch(numbers[:AT_ONCE])):
            continue
        for name in METRICS:
            config = kinds[name].config()
            assert isinstance(config, MetricConfig)
            metric = config.build(run.data)
            starts = range(0, len(numbers), AT_ONCE)
            batches = (torch.from_numpy(examples.batch(numbers[start : start + AT_ONCE]).targets) for start in starts)
            sums = reduce(operator.add, (metric.sums(targets, targets) for targets in batches))
            values[f"{split}.{name}"] = metric.compute(sums)
    return values


def _has_answers(batch: Batch) -> bool:
    """Return True if every example ends with an answer, and all answers start at the same position."""
    counted = batch.targets != IGNORED
    start = int(counted[0].argmax())
    asked = start > 0 or len(batch.inputs) > 1
    return asked and bool(counted[:, start:].all()) and not bool(counted[:, :start].any())

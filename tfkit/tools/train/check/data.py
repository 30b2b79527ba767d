"""Properties of data and metrics: examples, the order in which steps take them, and what counts in an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np

from tfkit.errors import SpecError
from tfkit.run.checked_run import Run, check_metrics, positions_of
from tfkit.run.contract import IGNORE_INDEX, Array, Batch, Ids, MetricConfig, Order
from tfkit.run.run_spec import SplitConfig
from tfkit.run.training.evaluate import evaluate_splits
from tfkit.run.training.memory import MicroBatch
from tfkit.run.training.task_scores import TaskScorer
from tfkit.spec.messages import kind_of
from tfkit.tools.check.measure import Deviation, property_of
from tfkit.tools.train.check.options import batch_arrays, equal_arrays
from tfkit.tools.train.check.run_under_test import EXAMPLES, SEQUENCES, RunUnderTest, read_data, train_reduced_run

EPOCHS = 3
EXAMPLE_COUNT, WITHOUT_ANSWER = 6, 3
"""Number of examples of an evaluation, and of additional examples without a position that counts."""


@property_of("examples", "reads each example alike in any batch", of="run")
def example_independence(subject: RunUnderTest) -> Iterator[Deviation]:
    """An example depends on its index alone: not on its batch, on earlier reads, or on when the data was built."""
    config, where = subject.run.config, kind_of(type(subject.run.config.data))
    where = f"{where} `{config.data.kind_name()}`"
    data, again = subject.run.data, read_data(config)
    if data.fingerprint != again.fingerprint:
        yield Deviation.fault("data that is built again has a different `fingerprint`", where)
    for split in data.splits:
        listed = data.examples(split, config.data.order)
        numbers = np.arange(len(listed))
        together, backwards = listed.batch(numbers), listed.batch(numbers[::-1].copy())
        repeated = again.examples(split, config.data.order).batch(numbers)
        longest = max(ids.shape[1] for ids in together.inputs.values() if ids.ndim > 1)
        # Rows of other splits may be longer than in training. Their first row must show it, because a run compares
        # that row with the model.
        limit = data.length if split == "train" else max(data.length, positions_of(data, split))
        if longest > limit and split in ("train", *(config.eval.splits if config.eval else ())):
            source = f"the `length` {limit} of the data" if limit == data.length else f"its first, which has {limit}"
            yield Deviation.fault(f"examples of `{split}` have {longest} positions, more than {source}", where)
        for number in range(len(numbers)):
            row = together.rows(number, number + 1)
            location = len(numbers) - 1 - number
            for other, how in (
                (listed.batch(np.array([number])), "alone"),
                (backwards.rows(location, location + 1), "in the reverse order"),
                (repeated.rows(number, number + 1), "from data that is built again"),
            ):
                if not _equal_rows(row, other):
                    yield Deviation.fault(f"example {number} of `{split}` differs if it is read {how}", where)
    yield Deviation(0.0, "")


def _equal_rows(row: Batch, other: Batch) -> bool:
    """Return True if rows are equal. If their padded lengths differ, compare only the positions that count."""
    first, second = batch_arrays(row), batch_arrays(other)
    if [array.shape for array in first] == [array.shape for array in second]:
        return all(map(equal_arrays, first, second))
    padded = row.masks.keys() | other.masks.keys()
    return np.array_equal(_counted_targets(row), _counted_targets(other)) and all(
        np.array_equal(_without_padding(row, name), _without_padding(other, name)) for name in padded
    )


def _counted_targets(batch: Batch) -> Array:
    if batch.targets is None:
        return np.zeros(0)
    return batch.targets[batch.targets != IGNORE_INDEX if batch.has_ids else ~np.isnan(batch.targets)]


def _without_padding(batch: Batch, name: str) -> Array:
    values = batch.inputs[name]
    return values[batch.masks[name]] if name in batch.masks else values.reshape(-1, *values.shape[2:])


@property_of("epochs", "reads the data in a new order in each epoch", of="run")
def epoch_order(subject: RunUnderTest) -> Iterator[Deviation]:
    """Every order reads the data as documented; shuffled, an epoch has every example once, in a new order."""
    everything, seed = [*range(EXAMPLES)], subject.run.config.seed
    size = len(subject.run.data.examples("train", "sequential"))
    if size < EXAMPLES:
        everything = [*range(size)]
    drawn = {order: _taken_indices(subject, order, seed) for order in ("shuffled", "sequential", "sampled")}
    of_epochs = [drawn["shuffled"][size * number : size * (number + 1)] for number in range(EPOCHS)]
    for number, indices in enumerate(of_epochs, 1):
        if sorted(indices) != everything:
            yield Deviation.fault(f"shuffled, epoch {number} does not have every example once")
    for (first, indices), (second, later) in combinations(enumerate(of_epochs, 1), 2):
        if size > 2 and indices == later:
            yield Deviation.fault(f"shuffled, epochs {first} and {second} have the same order")
    if drawn["sequential"] != [number % size for number in range(len(drawn["sequential"]))]:
        yield Deviation.fault("in sequence, the examples are not in their order")
    of_steps = [drawn["sampled"][start : start + SEQUENCES] for start in range(0, len(drawn["sampled"]), SEQUENCES)]
    if size > 1 and all(first == second for first, second in pairwise(of_steps)):
        yield Deviation.fault("sampled, every step has the same examples")
    for order in ("shuffled", "sampled"):
        if size > 2 and drawn[order] == _taken_indices(subject, order, seed + 1):
            yield Deviation.fault(f"{order}, a different seed draws the same examples")
    yield Deviation(0.0, "")


def _taken_indices(subject: RunUnderTest, order: Order, seed: int) -> list[int]:
    """Return the indices of the examples that the steps of a run take, in several epochs."""
    taken: list[int] = []

    def note(batch: Batch, indices: Ids) -> Batch:
        taken.extend(indices.tolist())
        return batch

    steps = subject.run.config.batch.sizes().steps_for(Fraction(EPOCHS * EXAMPLES))
    values = {
        ("data", "order"): order,
        ("seed",): seed,
        ("steps",): steps,
        ("eval",): None,
        ("checkpoint", "every"): None,
    }
    train_reduced_run(subject.changed(values, change=note))
    return taken


# ---- evaluations ----


@property_of("metrics", "evaluates what counts, and no more", of="run")
def metric_values(subject: RunUnderTest) -> Iterator[Deviation]:
    """Metrics do not depend on the micro-batch, nor on examples without a position that counts.

    The metrics of the run, and all others that can be computed on its data; and the likelihoods of its tasks.
    """
    config = subject.run.config
    plain, further = (
        subject.changed({}, examples=count, change=_with_ignored_targets)
        for count in (EXAMPLE_COUNT, EXAMPLE_COUNT + WITHOUT_ANSWER)
    )
    listed_metrics = config.eval.metrics if config.eval else ()
    kinds = {metric.kind_name() for metric in listed_metrics}
    for metric in (
        *listed_metrics,
        *(item for item in subject.small_configs("metric") if item.kind_name() not in kinds),
    ):
        assert isinstance(metric, MetricConfig)
        try:
            expected = _evaluated_metric(subject, plain, metric, SEQUENCES)
        except SpecError:
            if metric in listed_metrics:
                raise
            continue
        where = f"{kind_of(type(metric))} `{metric.kind_name()}`"
        for size in (1, SEQUENCES - 1):
            got = _evaluated_metric(subject, plain, metric, size)
            yield from _equal_numbers(got, expected, f"in micro-batches of {size}", where)
        if metric.objective and not config.loss.predicts_targets:  # it decides what counts
            continue
        with suppress(SpecError):  # a metric may reject such examples
            got = _evaluated_metric(subject, further, metric, SEQUENCES)
            yield from _equal_numbers(got, expected, "with further examples in which nothing counts", where)
    yield from _equal_scores(subject)


def _equal_scores(subject: RunUnderTest) -> Iterator[Deviation]:
    """Compare the likelihoods of a few questions of each task, one continuation at a time and together."""
    model, config = subject.of_model.model, subject.run.config
    for number, task_config in enumerate(subject.full.config.eval.tasks if subject.full.config.eval else ()):
        try:
            task = subject.run.task_of(task_config, "eval", "tasks", str(number)).first(EXAMPLE_COUNT)
        except SpecError:  # a continuation may be too long for the reduced model
            continue
        scorer = TaskScorer(model, config.loss)
        alone, together = (
            scorer.scores(task, lambda compute: compute(positions)).likelihoods  # noqa: B023  called at once
            for positions in (1, task.longest * len(task.continuations))
        )
        error = float(np.max(np.abs(alone - together) / np.maximum(1.0, np.abs(together))))
        yield Deviation(error, f"likelihoods of `{task.name}` differ if they are computed together", where="task")


def _with_ignored_targets(batch: Batch, indices: Ids) -> Batch:
    """Ignore all targets of the examples after the first ones."""
    late = indices >= EXAMPLE_COUNT

    def ignored(targets: Ids) -> Ids:
        return np.where(late.reshape(-1, *[1] * (targets.ndim - 1)), IGNORE_INDEX, targets)

    further = {name: ignored(targets) for name, targets in batch.further_targets.items()}
    choices = tuple(_with_ignored_targets(choice, indices) for choice in batch.alternatives)
    if batch.targets is None:
        return batch
    if batch.has_ids:
        return replace(batch, targets=ignored(batch.ids), further_targets=further, alternatives=choices)
    targets = batch.targets.copy()
    targets[late] = np.nan
    counted = np.ones(len(late), np.bool_) if batch.counted is None else batch.counted.copy()
    counted[late] = False
    return replace(batch, targets=targets, counted=counted)


def _evaluated_metric(subject: RunUnderTest, run: Run, metric: MetricConfig, size: int) -> dict[str, float]:
    """Return the numbers of a metric on all examples of the split that the run evaluates."""
    check_metrics(run, [metric])
    micro_batch = MicroBatch(run)
    micro_batch.size = size
    splits = {name: SplitConfig(batches="all") for name in (run.config.eval.splits if run.config.eval else ())}
    return evaluate_splits(subject.of_model.model, run, splits, [metric], micro_batch=micro_batch)


def _equal_numbers(got: dict[str, float], expected: dict[str, float], how: str, where: str) -> Iterator[Deviation]:
    for name, number in expected.items():
        error = abs(got[name] - number) / max(1.0, abs(number))
        yield Deviation(error, f"`{name}` is {got[name]:.6g} {how}, and {number:.6g} without", where=where)

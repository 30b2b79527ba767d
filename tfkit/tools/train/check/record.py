"""Properties that the folder of a run shows: evaluations, callbacks, resuming, and the digest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from tfkit.component import FieldPath, leaf_values, with_values
from tfkit.errors import Invalid, SpecError
from tfkit.run.checked_run import Run
from tfkit.run.run_meaning import LABELS
from tfkit.run.training.checkpoint import Restored
from tfkit.tools.check.measure import TOLERANCE, Deviation, property_of, tensor_deviation
from tfkit.tools.check.properties.training import without_dropout
from tfkit.tools.check.properties.values import other_numbers
from tfkit.tools.train.check.options import other_values
from tfkit.tools.train.check.run_under_test import RunUnderTest, Tensors, TrainedSteps, train_reduced_run

T = TypeVar("T")
TRAINED = 3
"""Number of steps after which a value must have changed the numbers of a run."""
LEFT_OUT = [("machine", name) for name in ("compile", "shard", "gather")]
"""Values without an effect in a single process, and compilation, which takes too long."""
BFLOAT16 = 1e-3
"""Largest difference between the losses of two machines in bfloat16."""


@property_of("evaluation", "is not changed by an evaluation", of="run")
def evaluation_effect(subject: RunUnderTest) -> Iterator[Deviation]:
    """An evaluation after every step changes no bit of a weight."""
    without, each = (
        train_reduced_run(subject.changed({("eval",): None})),
        train_reduced_run(subject.changed({("eval", "every"): 1})),
    )
    yield from _equal_weights(each, without, "an evaluation after every step")


@property_of("callbacks", "is not changed by its callbacks", of="run", follows=("evaluation",))
def callback_effects(subject: RunUnderTest) -> Iterator[Deviation]:
    """Callbacks change no bit of a weight, unless they reject updates. Every kind without required fields is tried."""
    plain = train_reduced_run(subject.changed({("callbacks",): ()}))
    for config in subject.callbacks:
        observed = train_reduced_run(subject.changed({("callbacks",): (config,)}))
        if not observed.numbers("rejected"):
            yield from _equal_weights(observed, plain, f"the callback `{config.kind_name()}`")


def _equal_weights(steps: TrainedSteps, expected: TrainedSteps, cause: str) -> Iterator[Deviation]:
    """Compare the weights after each step; a callback may end a run early."""
    for step, (weights, other) in enumerate(zip(steps.weights, expected.weights, strict=False), 1):
        for name, weight in other.items():
            yield tensor_deviation(weights[name], weight, f"{cause} changes `{name}` of step {step} by {{}}", limit=0.0)


@property_of("resume", "resumes with equal bits after any step", of="run", follows=("evaluation",))
def resumed_run(subject: RunUnderTest) -> Iterator[Deviation]:
    """A run that resumes from the checkpoint of any step ends with equal weights and equal states."""
    run = subject.changed({("callbacks",): subject.callbacks})
    full = train_reduced_run(run)
    last = full.notes.checkpoints[-1]
    for checkpoint, position in zip(full.notes.checkpoints[:-1], full.notes.positions, strict=False):
        resumed, how = train_reduced_run(run, start=checkpoint), f"resumed after step {checkpoint.step}"
        end = resumed.notes.checkpoints[-1]
        for name, tensor in full.hidden.items():
            if name not in resumed.hidden or not torch.equal(resumed.hidden[name], tensor):
                cause = "it is neither a parameter nor a persistent buffer"
                yield Deviation.fault(f"{how}, the tensor `{name}` of the loss differs: {cause}")
        yield from _different_tensors(end, last, how)
        for config, state, before in zip(run.config.callbacks, end.callbacks, last.callbacks, strict=True):
            if state != before:
                detail = f"{how}, the callback has a different state: its `state` and `restore` do not fit"
                yield Deviation.fault(detail, f"callback kind `{config.kind_name()}`")
        for (step, line), (_, expected_line) in zip(resumed.notes.lines, full.notes.lines[position:], strict=False):
            if line != expected_line:
                differing = [name for name in {**line, **expected_line} if line.get(name) != expected_line.get(name)]
                yield Deviation.fault(f"{how}, `{differing[0]}` of step {step} differs")


def _different_tensors(end: Restored, last: Restored, how: str) -> Iterator[Deviation]:
    for what, tensors, expected in _checkpoint_tensors(end, last):
        if tensors.keys() != expected.keys():
            names = ", ".join(sorted(tensors.keys() ^ expected.keys()))
            yield Deviation.fault(f"{how}, the run has other tensors in {what}: {names}")
            continue
        for name, tensor in expected.items():
            yield tensor_deviation(tensors[name], tensor, f"{how}, {what} `{name}` differs by {{}}", limit=0.0)


def _checkpoint_tensors(end: Restored, last: Restored) -> Iterator[tuple[str, Tensors, Tensors]]:
    """Yield the named tensors of two checkpoints."""
    yield "the weight", end.weights, last.weights
    yield "the optimizer state", end.optimizer, last.optimizer
    yield "the callback state", end.tensors, last.tensors


@property_of("digest", "has another digest if numbers differ", of="run", follows=("steps",))
def digest_coverage(subject: RunUnderTest) -> Iterator[Deviation]:
    """A value that does not change the digest changes no bit of a weight; in `machine`, losses change by rounding."""
    graph = subject.of_model.changed(without_dropout(subject.of_model))
    base = subject.changed({}, graph=graph)
    expected = train_reduced_run(base, until=TRAINED)
    for path, alternatives in _all_values(subject):
        changed = _first_valid(partial(subject.changed, {path: other}, graph=graph) for other in alternatives)
        if changed is not None and changed.digest == base.digest:
            yield from _same_numbers(changed, expected, f"a different `{'.'.join(path)}`", path[0])
    for path, value in leaf_values(base.graph.spec.model):
        numbers = other_numbers(value) if isinstance(value, int | float) and path[0] not in LABELS else ()
        model = _first_valid(partial(with_values, base.semantics.model, {path: other}) for other in numbers)
        if model is not None and replace(base.semantics, model=model).digest == base.digest:
            yield Deviation.fault(f"a different `model.{'.'.join(path)}` does not change the digest")
    yield Deviation(0.0, "")


def _first_valid(builds: Iterable[Callable[[], T]]) -> T | None:
    """Return the first config or run that is valid; None if all are invalid."""
    for build in builds:
        with suppress(SpecError, ValueError, Invalid):
            return build()
    return None


def _all_values(subject: RunUnderTest) -> Iterator[tuple[FieldPath, list[Any]]]:
    """Yield each value of a run with alternatives to try, including the texts that describe the run."""
    config = subject.run.config
    left_out = {*LEFT_OUT, ("machine", "micro_batch")} if config.loss.undivided else LEFT_OUT
    for path, alternatives in other_values((), config, of_all=True):
        if path[0] != "tfkit" and path not in left_out:
            yield path, alternatives
    yield from (((name,), ["other"]) for name in ("name", "description", "source"))


def _same_numbers(run: Run, expected: TrainedSteps, cause: str, part: str) -> Iterator[Deviation]:
    """Compare a run whose digest has not changed."""
    steps = train_reduced_run(run, until=TRAINED)
    if part != "machine":
        yield from (
            Deviation(deviation.error, f"{deviation.detail}, but not the digest of the run", 0.0)
            for deviation in _equal_weights(steps, expected, cause)
        )
        return
    limit = TOLERANCE if run.config.precision == "float32" else BFLOAT16
    for loss, before in zip(steps.numbers("loss"), expected.numbers("loss"), strict=True):
        error = abs(loss - before)
        yield Deviation(error, f"{cause} changes the loss by {error:.1e}, not the digest", limit)

"""Properties of a training step: the sum of its loss, its random numbers, and the norm of its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch

from tfkit.building.builder import build
from tfkit.component import FieldPath, leaf_values
from tfkit.reference.training import UNSEEN, documents_mask, targets_at, tokens_ahead
from tfkit.run.checked_run import inputs_for
from tfkit.run.contract import IGNORE_INDEX, Batch, Ids, OutputConfig
from tfkit.run.training.changing import ChangingValues
from tfkit.run.training.evaluate import batch_tensors
from tfkit.run.training.evaluate import loss_sums as loss_sums_of
from tfkit.run.training.noise import Noise
from tfkit.tools.check.measure import Deviation, property_of, require, tensor_deviation, without_formula
from tfkit.tools.check.properties.training import without_dropout
from tfkit.tools.common.model_inputs import as_tensors
from tfkit.tools.train.check.run_under_test import (
    SEQUENCES,
    STEPS,
    Half,
    RunUnderTest,
    Tensors,
    TrainedSteps,
    train_reduced_run,
)

IN_ORDER: Mapping[FieldPath, Any] = {
    ("data", "order"): "sequential",
    ("clip",): None,
    ("eval",): None,
    ("precision",): "float32",
}
"""Settings with which a step takes the first examples and does not change the gradients of the loss."""


KEPT_FRACTIONS = np.array([1, 0, 1 / 3, 2 / 3])
"""The fraction of targets that each of four rows keeps."""


@property_of("steps", "makes steps with finite numbers", of="run", basic=True)
def finite_steps(subject: RunUnderTest) -> Iterator[Deviation]:
    """Every step has a finite loss and finite gradients, and changes weights, but no frozen weight."""
    trained = train_reduced_run(subject.run)
    for name in ("loss", "grad_norm"):
        for step, number in enumerate(trained.numbers(name), 1):
            if not math.isfinite(number):
                yield Deviation.fault(f"`{name}` of step {step} is {number}")
    frozen = {name for name, parameter in subject.new_model().named_parameters() if not parameter.requires_grad}
    first, last = trained.weights[0], trained.weights[-1]
    for name in frozen:
        yield tensor_deviation(last[name], first[name], f"`{name}` is frozen, but changes by {{}}", limit=0.0)
    if all(torch.equal(first[name], last[name]) for name in first):
        yield Deviation.fault("no weight changes between the first step and the last")
    yield Deviation(0.0, "")


@property_of("sums", "sums its loss over what counts", of="run")
def loss_sums(subject: RunUnderTest) -> Iterator[Deviation]:
    """Loss and gradients of a step do not depend on its division into micro-batches or between two processes.

    Rows have different numbers of positions that count; one row has none. The rows of a loss that counts for itself are
    unchanged, because it may need all targets of a row. Dropout is off.
    """
    config = subject.run.config
    require(not config.loss.undivided, "the loss is computed from all sequences of a step together")
    graph = subject.of_model.changed(without_dropout(subject.of_model))
    full, change = train_reduced_run(run := subject.changed(IN_ORDER, graph=graph), until=1), None
    if not full.counts_itself:
        change = _ragged_targets
        full = train_reduced_run(run := subject.changed(IN_ORDER, graph=graph, change=change), until=1)
    for size in range(1, SEQUENCES):
        micro = {**IN_ORDER, ("machine", "micro_batch"): size}
        cut = train_reduced_run(subject.changed(micro, graph=graph, change=change), until=1)
        yield from _equal_steps(full, cut.numbers("loss")[0], cut.gradients[0], f"micro-batches of {size}")
    batch = run.data.examples("train", "sequential").batch(np.arange(SEQUENCES))
    processes = [Half(rank, batch.counts_of(config.loss.terms)) for rank in range(Half.count)]
    halves = [train_reduced_run(run, until=1, processes=half) for half in processes]
    shares = [1.0 if half.share is None else half.share for half in processes]
    if processes[0].share is not None:  # each half was divided by its count alone
        shares = [share / (sum(shares) or 1.0) for share in shares]
    weighted = zip(shares, (half.gradients[0] for half in halves), strict=True)
    parts = [{name: share * gradient for name, gradient in part.items()} for share, part in weighted]
    gradients = {name: sum((part[name] for part in parts), torch.zeros(())) for name in full.gradients[0]}
    loss = sum(share * half.numbers("loss")[0] for share, half in zip(shares, halves, strict=True))
    yield from _equal_steps(full, loss, gradients, "two processes")


def _ragged_targets(batch: Batch, indices: Ids) -> Batch:
    """Ignore some ids of a batch: of four rows one keeps all, the next none, and two keep the first ones."""

    def thinned(targets: Ids) -> Ids:
        by_row = targets.reshape(len(targets), -1)
        numbers = (by_row != IGNORE_INDEX).cumsum(1)  # number of each position that counts, from 1
        remaining = numbers <= np.ceil(numbers[:, -1:] * KEPT_FRACTIONS[indices % SEQUENCES][:, None])
        return np.where(remaining, by_row, IGNORE_INDEX).reshape(targets.shape)

    further = {name: thinned(targets) for name, targets in batch.further_targets.items()}
    targets = thinned(batch.ids) if batch.has_ids else batch.targets
    return replace(batch, targets=targets, further_targets=further)


def _equal_steps(full: TrainedSteps, loss: float, gradients: Tensors, how: str) -> Iterator[Deviation]:
    """Compare the loss and the gradients of a step with a step of all its rows together."""
    expected = full.numbers("loss")[0]
    error = abs(loss - expected) / max(1.0, abs(expected))
    numbers = f"the loss of a step in {how} is {loss:.7g}; in one piece it is {expected:.7g}"
    yield Deviation(error, f"{numbers}: a loss must return the sum over what counts, not a mean")
    largest = max(float(gradient.abs().max()) for gradient in full.gradients[0].values())
    for name, gradient in full.gradients[0].items():
        error = float((gradients[name] - gradient).abs().max()) / largest
        yield Deviation(error, f"the gradient of `{name}` differs by {error:.1e} in {how}")


@property_of("loss", "has the loss of its formula", of="run", follows=("sums",), compares=lambda subject: "the loss")
def loss_formula(subject: RunUnderTest) -> Iterator[Deviation]:
    """The loss of a step equals the formula of its kind, from the logits of the model."""
    config = subject.run.config.loss
    formula = subject.functions["loss"].get(config.kind_name())
    require(formula, without_formula([("loss", config.kind_name())]))
    graph = subject.of_model.changed(without_dropout(subject.of_model))
    run = subject.changed(IN_ORDER, graph=graph, change=_ragged_targets)
    (got,) = train_reduced_run(run, until=1).numbers("loss")
    batch = run.data.examples("train", "sequential").batch(np.arange(SEQUENCES))
    model = build(graph, seed=run.config.seed).eval()
    with torch.no_grad():
        outputs = as_tensors(model(**batch_tensors(batch, model, torch.device("cpu"), config)[0]))
    by_name, expected = dict(zip(graph.outputs, outputs, strict=True)), 0.0
    for name, targets in batch.targets_of(config.terms).items():
        logits = by_name[name or graph.outputs[0]].flatten(0, -2).double().numpy()
        total = formula(config, logits, targets.reshape(-1)) if formula is not None else 0.0
        weight = config.terms[name].weight if name else 1.0
        expected += weight * total / max(int((targets != IGNORE_INDEX).sum()), 1)
    error = abs(got - expected) / max(1.0, abs(expected))
    yield Deviation(error, f"the loss of the first step is {got:.7g}; expected {expected:.7g}")


@property_of("targets", "predicts the tokens of its rows", of="run")
def step_targets(subject: RunUnderTest) -> Iterator[Deviation]:
    """The inputs and targets of a step are what the reference defines from the rows of the data.

    These are next tokens, the targets of each output at its shift, the inputs ahead, and the masks of documents.
    """
    config, run = subject.run.config, subject.changed(IN_ORDER)
    batch = run.data.examples("train", "sequential").batch(np.arange(SEQUENCES))
    inputs, targets = _first_arguments(train_reduced_run(run, until=1))
    names = inputs_for(run.graph, batch.inputs, config.loss)
    for name, values in batch.inputs.items():
        yield from _equal_positions(inputs[names[name]], values, f"the input `{names[name]}`")
    last = [*batch.inputs][-1]  # of a pair, the target
    tokens, shape = batch.inputs[last], batch.inputs[last].shape[:2]
    real = batch.masks.get(last, np.ones(shape, bool))
    documents = np.zeros(shape, int) if batch.documents is None else batch.documents
    formula = subject.functions["data"].get(config.data.kind_name())
    if formula is not None and batch.has_ids and batch.ids.shape == shape:
        expected = np.stack([formula(config.data, *row) for row in zip(tokens, documents, real, strict=True)])
        free = (expected == UNSEEN) | (batch.ids == IGNORE_INDEX)  # data may leave out targets
        yield from _equal_positions(batch.ids, np.where(free, batch.ids, expected), "the target of the data")
    for name, term in ((config.loss.terms or {"": OutputConfig()}) if batch.targets is not None else {}).items():
        of_output: Any = batch.further_targets.get(name, batch.targets)
        if term.shift > 1:
            of_output = np.stack([targets_at(term.shift, *row) for row in zip(of_output, documents, strict=True)])
        got = targets[name] if config.loss.terms else targets
        yield from _equal_positions(got, of_output, f"the target of `{name or run.graph.outputs[0]}`")
    first, ends = (
        next(iter(batch.inputs.values())),
        documents if batch.documents is None else np.where(real, documents, -1),
    )
    for name, distance in config.loss.inputs_ahead.items():
        expected = np.stack([tokens_ahead(distance, *row) for row in zip(first, ends, strict=True)])
        yield from _equal_positions(inputs[name], expected, f"the input `{name}`")
    if batch.documents is not None:
        expected = np.stack([documents_mask(*row) for row in zip(documents, real, strict=True)])
        for mask in {run.graph.inputs[name].mask for name in (names[last], *config.loss.inputs_ahead)} & {*inputs}:
            yield from _equal_positions(inputs[str(mask)], expected, f"the mask `{mask}`")
    yield Deviation(0.0, "")


def _first_arguments(steps: TrainedSteps) -> tuple[Tensors, Any]:
    """Return the inputs and targets of the first step, of all its micro-batches."""
    inputs, targets = zip(*(arguments[:2] for arguments in steps.arguments), strict=True)
    if targets[0] is None:
        return _joined(inputs), None
    return _joined(inputs), _joined(targets) if isinstance(targets[0], Mapping) else torch.cat(targets)


def _joined(parts: Sequence[Tensors]) -> Tensors:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _equal_positions(got: Any, expected: Any, what: str) -> Iterator[Deviation]:
    """Compare the values of a batch, and name the first that differs."""
    got = np.asarray(got)
    if got.shape != expected.shape:
        yield Deviation.fault(f"{what} has the shape {[*got.shape]}; expected {[*expected.shape]}")
        return
    equal = np.isclose(got, expected, rtol=0, atol=0, equal_nan=True)  # NaN is a target that does not count
    for row, *at in np.argwhere(~equal)[:1].tolist():
        values = f"{got[(row, *at)]}; expected {expected[(row, *at)]}"
        yield Deviation.fault(f"{what} at {at} of example {row} is {values}")


@property_of("noise", "drops anew in each part of a step", of="run")
def dropout_noise(subject: RunUnderTest) -> Iterator[Deviation]:
    """Equal rows have different dropout in each micro-batch, step and process, and the same dropout in a second run."""
    rates = [value for path, value in subject.of_model.values.items() if path[-1] == "dropout" and value]
    require(rates, "every rate of dropout is 0")
    require(not subject.run.config.loss.undivided, "the loss is computed from all sequences of a step together")
    run = subject.changed({**IN_ORDER, **_negligible_rates(subject), ("machine", "micro_batch"): 1}, examples=1)
    first, again, second = (
        train_reduced_run(run, until=2),
        train_reduced_run(run, until=2),
        train_reduced_run(run, until=1, processes=Half(1)),
    )
    parts = {
        f"micro-batch {number} of step {step}": loss
        for step, losses in enumerate(first.parts[:2], 1)
        for number, loss in enumerate(losses, 1)
    }
    parts |= {f"micro-batch {number} of a second process": loss for number, loss in enumerate(second.parts[0], 1)}
    for (name, loss), (other, other_loss) in combinations(parts.items(), 2):
        if torch.equal(loss, other_loss):
            yield Deviation.fault(f"{name} and {other} have the same dropout")
    for losses, repeated in zip(first.parts, again.parts, strict=True):
        for loss, other_loss in zip(losses, repeated, strict=True):
            yield tensor_deviation(
                other_loss, loss, "a second run has other dropout: its loss changes by {}", limit=0.0
            )


def _negligible_rates(subject: RunUnderTest) -> dict[FieldPath, Any]:
    """Return learning rates so small that no weight changes."""
    fields = leaf_values(subject.run.config.optimizer, ("optimizer",))
    return {path: 1e-30 for path, value in fields if path[-1] == "lr" and value is not None}


@property_of("clipping", "clips all gradients by one norm", of="run")
def gradient_clipping(subject: RunUnderTest) -> Iterator[Deviation]:
    """If the norm of all gradients exceeds `clip`, one factor scales it to `clip`; otherwise no bit changes."""
    plain = train_reduced_run(subject.changed(IN_ORDER), until=1)
    gradients = plain.gradients[0]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    (reported,) = plain.numbers("grad_norm")
    detail = f"`grad_norm` is {reported:.6g}, but the norm of all gradients is {norm:.6g}"
    yield Deviation(abs(reported - norm) / norm, detail)
    for limit in (min(norm, 1.0) / 2, norm * 2):
        clipped = train_reduced_run(subject.changed({**IN_ORDER, ("clip",): limit}), until=1).gradients[0]
        factor = min(1.0, limit / norm)
        for name, gradient in gradients.items():
            size, expected = (float(tensor.double().norm()) for tensor in (clipped[name], gradient * factor))
            detail = (
                f"with `clip: {limit:.3g}` and a norm of {norm:.3g}, the gradient of `{name}` has the norm {size:.3g};"
                f" expected {expected:.3g}"
            )
            yield Deviation(float((clipped[name] - gradient * factor).double().norm()) / norm, detail)


@property_of("numbers", "computes each step with its numbers", of="run", follows=("loss",))
def numbers_of_steps(subject: RunUnderTest) -> Iterator[Deviation]:
    """A step whose numbers change computes the loss of a model and a loss that are built with its numbers."""
    run = subject.run
    require(run.by_step, "no number of the model or of the loss changes by step")
    batch = run.data.examples("train", "sequential").batch(np.arange(SEQUENCES))
    model = build(run.graph, seed=subject.seed)
    values, loss = ChangingValues(run, model), run.config.loss.build(model)
    values.follow(loss)
    for step in (1, STEPS):
        values.apply(step)
        at_step = values.run
        built = build(at_step.graph, seed=subject.seed)
        new_loss = at_step.config.loss.build(built)
        drops = all(value for path, value in run.values_at(step).items() if path[-1] == "dropout")  # else, no module
        totals = []
        for module, of_model, terms in ((loss, model, values.terms), (new_loss, built, at_step.config.loss.terms)):
            module.train(drops)
            of_model.train(drops)
            torch.manual_seed(subject.seed)
            noise = partial(Noise.of, torch.device("cpu"), subject.seed, "loss", step, range(SEQUENCES))
            total = loss_sums_of(module, at_step, of_model, torch.device("cpu"), batch, noise).total.detach()
            totals.append(total * total.new_tensor([term.weight for term in terms.values()] or [1.0]))
        detail = f"in step {step}, the loss differs by {{}} from the loss of a model with the numbers of the step"
        yield tensor_deviation(totals[0], totals[1], detail, limit=1e-5)

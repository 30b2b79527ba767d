"""Properties of the values of a run: each option of a slot has an effect, and each value of a run is in its digest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin

import numpy as np
from pydantic.fields import FieldInfo

from tfkit.component import Component, Config, FieldPath, ImmaterialMarker, marker, parts
from tfkit.errors import Invalid, SpecError
from tfkit.run.checked_run import Run
from tfkit.run.contract import Batch, OptimizerConfig
from tfkit.tools.check.components import legal_values
from tfkit.tools.check.measure import Deviation, property_of
from tfkit.tools.check.properties.values import other_numbers
from tfkit.tools.train.check.optimizer import DECAY, FACTORS, settings_of, weight_displacements
from tfkit.tools.train.check.run_under_test import SEQUENCES, RunUnderTest, read_data, train_reduced_run
from tfkit.tools.train.check.schedule import steps_to_compare

ENTIRE_SPLIT = 2**62
"""A number of examples that exceeds any split."""
SHORT_LENGTH = 2
"""A length that shows the treatment of longer rows."""
ROWS = 8 * SEQUENCES
"""Examples of each split that show the effect of an option of the data."""


@property_of("options", "changes with every option of its kinds", of="run", follows=("optimizer", "schedule"))
def option_effects(subject: RunUnderTest) -> Iterator[Deviation]:
    """A different value of a field of the optimizer, schedule, loss or data changes what the kind computes."""
    optimizers = parts(("optimizer",), subject.run.config.optimizer)
    base: dict[FieldPath, Any] = {
        (*path, "weight_decay"): part.weight_decay or DECAY
        for path, part in optimizers
        if isinstance(part, OptimizerConfig)
    }
    base[("eval",)] = None
    before = subject.changed(base, examples=ENTIRE_SPLIT)
    for slot, observe in OBSERVED.items():
        expected = observe(subject, before)
        for path, alternatives in other_values((slot,), getattr(before.config, slot)):
            idle = None
            for other in alternatives:
                with suppress(SpecError, ValueError, Invalid):
                    changed = subject.changed({**base, path: other}, examples=ENTIRE_SPLIT)
                    if path[-1] == "decay_all" and _weight_settings(subject, changed) == _weight_settings(
                        subject, before
                    ):
                        continue  # every weight of this optimizer decays anyway
                    idle = _is_equal(observe(subject, changed), expected)
                    if not idle:
                        break
            if idle:
                yield Deviation.fault(f"`{'.'.join(path)}` has no effect: `{slot}` computes the same", slot)
    yield Deviation(0.0, "")


def _weight_settings(subject: RunUnderTest, run: Run) -> dict[str, tuple[float, float]]:
    return settings_of(subject.new_model(), run.config.optimizer)


def _optimizer_steps(subject: RunUnderTest, run: Run) -> list[Any]:
    """Return the steps of an optimizer with random gradients."""
    return list(weight_displacements(subject, run.config.optimizer, FACTORS[:3]).values())


def _schedule_factors(subject: RunUnderTest, run: Run) -> list[Any]:
    """Return the factors of all steps of the full run."""
    config, steps = run.config.schedule, subject.full.steps
    config.check_steps(steps)
    return [config.factor(step, steps) for step in steps_to_compare(steps, 1)]


def _losses(subject: RunUnderTest, run: Run) -> list[Any]:
    """Return the losses of two steps: weights that are initially 0, and the state of a loss, change after the first."""
    return train_reduced_run(run, until=2).numbers("loss")


def _data_contents(subject: RunUnderTest, run: Run) -> list[Any]:
    """Return the sizes of data and the first examples of each split, and the result for rows that are too long."""
    data, order = run.data, run.config.data.order
    facts: list[Any] = [data.vocab_size, data.length, *data.splits]
    for split in data.splits:
        examples = data.examples(split, order)
        facts += [len(examples), *batch_arrays(examples.batch(np.arange(min(ROWS, len(examples)))))]
    if run.config.batch.length is not None:
        batch = run.config.batch.model_copy(update={"length": SHORT_LENGTH})
        try:
            short = read_data(run.config.model_copy(update={"batch": batch}))
            facts += [len(short.examples(split, order)) for split in short.splits]
        except (SpecError, ValueError, Invalid) as error:
            facts.append(str(error))
    return facts


OBSERVED: Mapping[str, Callable[[RunUnderTest, Run], list[Any]]] = {
    "optimizer": _optimizer_steps,
    "schedule": _schedule_factors,
    "loss": _losses,
    "data": _data_contents,
}
"""By slot, the function that computes the numbers on which its options must have an effect."""


def batch_arrays(batch: Batch) -> list[Any]:
    """Return all arrays of a batch."""
    named = [batch.inputs, batch.masks, batch.further_targets]
    inside = [array for choice in batch.alternatives for array in batch_arrays(choice)]
    optional = [array for array in (batch.targets, batch.counted, batch.documents) if array is not None]
    return [*optional, *(array for names in named for array in names.values()), *inside]


def _is_equal(facts: list[Any], expected: list[Any]) -> bool:
    return len(facts) == len(expected) and all(map(equal_arrays, facts, expected))


def equal_arrays(array: Any, other: Any) -> bool:
    """Return True if arrays are equal; a NaN, as the target of a position that does not count, equals itself."""
    return np.array_equal(array, other, equal_nan=np.asarray(array).dtype.kind == "f")


# ---- other values ----


def other_values(start: FieldPath, root: Config, *, of_all: bool = False) -> Iterator[tuple[FieldPath, list[Any]]]:
    """Yield the path of each value inside a config, with different values to try, nearest first.

    Texts and orders are omitted. Values that are declared to change no number are included only with `of_all`.
    """
    for path, part in parts(start, root):
        for name, info in type(part).model_fields.items() if isinstance(part, Config) else ():
            value = getattr(part, name)
            named = isinstance(part, Component) and name == part.word_key
            if not named and name != "order" and (of_all or marker(info, ImmaterialMarker) is None):
                if isinstance(value, tuple) and value and all(type(item) in (int, float) for item in value):
                    for index, item in enumerate(value):
                        alternatives = [(*value[:index], other, *value[index + 1 :]) for other in other_numbers(item)]
                        yield (*path, name), alternatives
                elif alternatives := _other_field_values(name, info, value):
                    yield (*path, name), alternatives


def _other_field_values(name: str, info: FieldInfo, value: Any) -> list[Any]:
    """Return different values of a field; none for texts and configs."""
    if value is None:
        legal = [other for other in legal_values(name, info) if other is not None]
        numbers = [other for other in legal if isinstance(other, int | float)]  # one may be what None stands for
        return [*legal, *(near for number in numbers for near in other_numbers(number))]
    if isinstance(value, int | float):  # a small probability, and a smaller one, may affect no example of few
        return [*other_numbers(value), *([1 - value] if 0 < value < 1 else [])]
    if isinstance(value, str) and get_origin(info.annotation) is Literal:
        return [word for word in get_args(info.annotation) if word != value]
    if isinstance(value, Mapping) and value and all(type(item) is float for item in value.values()):
        return [{**value, key: item / 2} for key, item in value.items()]
    return []

"""Properties of a schedule: its formula, and the learning rates of the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress

from tfkit.errors import Invalid
from tfkit.run.contract import count_of
from tfkit.spec.messages import kind_of
from tfkit.tools.check.measure import Deviation, property_of
from tfkit.tools.train.check.run_under_test import STEPS, RunUnderTest, train_reduced_run

MAX_STEPS, SHORT_RUN = 400, 23
"""Maximum number of steps whose factors are compared, half of them at the start; and the steps of a short run."""
TOLERANCE = 1e-12


@property_of("schedule", "has the rates of its formula", of="run")
def schedule_factors(subject: RunUnderTest) -> Iterator[Deviation]:
    """The factors of the run, and of a short run, equal the formula, and do not depend on earlier calls."""
    config, kind = subject.full.config.schedule, subject.full.config.schedule.kind_name()
    formula, where = subject.functions["schedule"].get(kind), f"{kind_of(type(config))} `{kind}`"
    for steps in (subject.full.steps, SHORT_RUN):
        with suppress(Invalid):  # a short run may have no room for the warmup
            config.check_steps(steps)
            peak = max(count_of(config.warmup, steps), 1)
            for step in steps_to_compare(steps, peak):
                factor = config.factor(step, steps)
                about = f"at step {step:,} of {steps:,}"
                if not (math.isfinite(factor) and factor >= 0) or (step <= peak and not factor):
                    yield Deviation.fault(f"{about} the factor of the rate is {factor}", where)
                if factor != config.factor(step, steps):
                    yield Deviation.fault(f"{about} a second call returns a different factor", where)
                expected = step / peak if step <= peak else None
                if formula is not None:
                    expected = formula(config, step, steps)
                if expected is not None:
                    detail = f"{about} the factor of the rate is {factor:.9g}; expected {expected:.9g}"
                    yield Deviation(abs(factor - expected), detail, TOLERANCE, where)


def steps_to_compare(steps: int, peak: int) -> list[int]:
    """Return steps at the beginning, around the peak, at the end, and between them; all of a short run."""
    near = [*range(1, 4), *range(peak - 1, peak + 3), *range(steps - 2, steps + 1)]
    spread = range(1, steps + 1, max(1, steps // MAX_STEPS))
    return sorted({step for step in (*near, *spread) if 1 <= step <= steps})


@property_of("rates", "takes the rate of each step", of="run", follows=("schedule",))
def step_rates(subject: RunUnderTest) -> Iterator[Deviation]:
    """The rate of a group is its `lr` times the factor of the step, and a step reports the rate of the first group."""
    config = subject.run.config
    trained = train_reduced_run(subject.run)
    for step in range(1, STEPS + 1):
        factor = config.schedule.factor(step, STEPS)
        for first_rate, rate in zip(trained.first_rates, trained.rates[step - 1], strict=True):
            expected = first_rate * factor
            detail = f"at step {step} a group of the rate {first_rate:g} has the rate {rate:g}; expected {expected:g}"
            yield Deviation(abs(rate - expected) / first_rate, detail, TOLERANCE)
        logged, expected = trained.numbers("lr")[step - 1], trained.first_rates[0] * factor
        detail = f"step {step} reports the rate {logged:g}; expected {expected:g}"
        yield Deviation(abs(logged - expected) / expected if expected else abs(logged), detail, TOLERANCE)

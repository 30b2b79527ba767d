"""The properties of runs, registered as a plugin of tfkit."""

from __future__ import annotations

import tfkit


@tfkit.hookimpl
def tfkit_properties() -> list[tfkit.Property | tfkit.SubjectType]:
    """Return the properties of a training step, in the order in which they are checked, and runs as their subject."""
    from tfkit.tools.train.check import data, optimizer, options, record, schedule, step
    from tfkit.tools.train.check.small_run import RunSubject

    return [
        RunSubject(),
        *(step.steps, step.sums, step.loss, step.noise, step.clipping),
        *(schedule.schedule, schedule.rates, optimizer.groups, optimizer.decay, optimizer.formula),
        *(options.options, data.examples, data.passes, data.metrics),
        *(record.evaluation, record.callbacks, record.resume, record.digest),
    ]

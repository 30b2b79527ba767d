"""Checks that runs are comparable: the sizes that a sweep declares equal, and the values that evaluations depend on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tfkit.commands import count_text, create_folder, flops_text, write_file
from tfkit.errors import Diagnostic, Invalid, SpecError
from tfkit.plugin.manager import Plugins
from tfkit.run.checked_run import CONTENT, SUFFIX, Run
from tfkit.run.read_sweep import SweepFile
from tfkit.run.run_meaning import Value
from tfkit.spec.render import render_spec
from tfkit.tools.cost.devices import Device, find_device
from tfkit.tools.sweep.arms import Arm, Arms, Choice
from tfkit.tools.train.plan import Plan, run_plan

SIZES: dict[str, tuple[str, Callable[[Plan], float]]] = {
    "params": ("parameters", lambda plan: plan.parameters),
    "flops": ("FLOPs", lambda plan: plan.flops),
    "tokens": ("tokens", lambda plan: plan.tokens),
    "time": ("seconds of predicted time", lambda plan: plan.seconds or 0.0),
}


def arm_sizes(arms: Arms, choices: Mapping[str, Choice], plugins: Plugins) -> dict[str, Plan]:
    """Return the size of each arm, with the values of its choice."""
    device = _device_for_time(arms.file, plugins)
    plans = {}
    for arm in arms.arms:
        run = arms.runs(arm, choices[arm.name])[0].run
        if device is not None and run.config.precision not in device.tera_flops:
            raise arms.file.error(f"{device.title} does not compute in {run.config.precision}", "equal", "device")
        plans[arm.name] = run_plan(run, device)
    return plans


def _device_for_time(file: SweepFile, plugins: Plugins) -> Device | None:
    """Return the device of `equal.time`; None if the sweep names no device."""
    equal = file.config.equal
    if equal is None or equal.device is None:
        return None
    try:
        return find_device(equal.device, folder=Path(file.file).parent, plugins=plugins)
    except Invalid as error:
        raise file.error(error.message, "equal", "device", help=error.help) from None


def check_equal(arms: Arms, plans: dict[str, Plan], folder: Path) -> None:
    """Raise SpecError for arms whose size differs too much from their baselines.

    The model of such an arm is written to the folder, as the input of the command that the help suggests.
    """
    equal = arms.config.equal
    shares = equal.shares() if equal else {}
    if "time" in shares and any(plan.seconds is None for plan in plans.values()):
        help = f"name a device: `equal: {{time: {equal and equal.time}, device: a100}}`, or a file with its limits"
        raise arms.file.error("the limits of the run's device are not known", "equal", "time", help=help)
    errors = []
    for name, share in shares.items():
        words, of = SIZES[name]
        for arm in arms.arms:
            size, base_size = of(plans[arm.name]), of(plans[arm.base])
            if abs(size - base_size) > share * base_size:
                message = size_difference(arm.name, size, words, arm.base, base_size)
                notes = (f"`equal` allows {100 * share:g}%",)
                span = arms.file.provenance.span(("variants", arm.variant))
                help = _help_for_size(arms, arm, name, size, base_size, folder)
                errors.append(Diagnostic(message, span, f"variants.{arm.variant}", notes, help))
    if errors:
        raise SpecError(*errors)


def check_transfer(arms: Arms, plans: Mapping[str, Plan]) -> None:
    """Raise SpecError if a variant has the tuned values of a size that is not its smallest size."""
    for arm in arms.arms:
        size, first = plans[arm.name].parameters, plans[arm.tuned_as].parameters
        if size < first:
            message = f"the first size must be the smallest to be tuned; got {first:,} parameters, then {size:,}"
            raise arms.file.error(message, "sizes", help="list sizes from the smallest to the largest")


def size_difference(name: str, size: float, words: str, base_name: str, base_size: float) -> str:
    """Describe the difference between two arms in a size such as parameters or tokens."""
    more = f"{100 * abs(size - base_size) / base_size:.2f}% {'more' if size > base_size else 'fewer'}"
    return f"{name} has {_size_text(size)} {words}, {more} than the {_size_text(base_size)} of {base_name}"


def short_size(size: float, words: str) -> str:
    """Format a size with its unit: `1.2M` parameters, `3.4E` FLOPs."""
    return flops_text(round(size)) if words == SIZES["flops"][0] else count_text(round(size))


def _size_text(size: float) -> str:
    return f"{size:,}" if isinstance(size, int) else f"{size:,.4g}"


def _help_for_size(arms: Arms, arm: Arm, name: str, size: float, target: float, folder: Path) -> str:
    """Return the help that describes how to reach an equal size."""
    if name == "tokens":
        return "give both the same `steps`, or both the same `tokens`"
    run = arms.runs(arm)[0].run
    if name == "flops":
        return f"about {round(run.steps * target / size):,} steps compute as many FLOPs"
    if name == "time":
        return f"about {round(run.steps * target / size):,} steps take as much time"
    location = folder / "models" / f"{arm.variant}.yaml"
    create_folder(location.parent, inside=folder)
    write_file(location, render_spec(run.graph.spec.model), inside=folder)
    command = shlex.join(["tfkit", "solve", str(location), "--params", str(target)])
    return f"find a model of that size: `{command}`"


LETTERS = 8
"""Number of digits of a digest in a message."""
NONE = "none"
"""The word for a value that a run does not have."""


def evaluation_differences(base: Run, run: Run, on: str) -> list[str]:
    """Describe the values in which the evaluations of two runs differ: `batch.length: 12 -> 8`."""
    before, after = (_evaluation_values(compared, on) for compared in (base, run))
    texts = {path: (word_of(path, before), word_of(path, after)) for path in {**before, **after}}
    return [f"{path}: {old} -> {new}" for path, (old, new) in texts.items() if old != new]


def _evaluation_values(run: Run, on: str) -> dict[str, Value]:
    """Return the values that an evaluation depends on, except the weights, by their paths."""
    split, _, name = on.partition(".")
    evaluations = run.config.eval
    assert evaluations is not None
    if task := next((task for task in run.tasks if on in task.names), None):
        return {f"eval.tasks.{task.name}{SUFFIX}": task.file.digest}
    names = [metric.names(split, run.config.loss.terms) for metric in evaluations.metrics]
    metric = f"eval.metrics.{next(number for number, reported in enumerate(names) if on in reported)}"
    parts = ["data", CONTENT, f"eval.splits.{split}", metric]
    idle = run.config.data.idle(split)
    length = {} if "length" in idle else {"batch.length": run.config.batch.longest}
    size = {} if evaluations.splits[split].batches == "all" else {"batch.sequences": run.config.batch.largest}
    values = {
        path.replace(metric, f"eval.{name}"): value
        for path, value in run.semantics.values.items()
        if _is_within(path, parts) and not _is_within(path, [f"data.{field}" for field in idle])
    }
    return {**size, **values, **length}


def _is_within(path: str, parts: Iterable[str]) -> bool:
    """Return True if a path equals one of `parts`, or is inside one of them."""
    return f"{path}.".startswith(tuple(f"{part}." for part in parts))


def word_of(path: str, values: Mapping[str, Value]) -> str:
    """Return a value in YAML syntax, `null` or `0.001`; `none` if the path has no value."""
    if path not in values:
        return NONE
    value = values[path]
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:LETTERS] if path.endswith(SUFFIX) else text

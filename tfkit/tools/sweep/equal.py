"""Checks that runs are comparable: the sizes that a sweep declares equal, and the values that evaluations depend on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tfkit.errors import Diagnostic, Invalid, SpecError
from tfkit.graph.run import CONTENT, SUFFIX, Run
from tfkit.graph.run_meaning import Value
from tfkit.plugin.manager import Plugins
from tfkit.spec.read_sweep import SweepFile
from tfkit.spec.render import render
from tfkit.tools.common.atomic_files import write_file, writing
from tfkit.tools.cost.device_file import find_device
from tfkit.tools.cost.devices import Device
from tfkit.tools.sweep.arms import Arm, Arms, Choice
from tfkit.tools.train.plan import Plan, plan

SIZES: dict[str, tuple[str, Callable[[Plan], float]]] = {
    "params": ("parameters", lambda one: one.parameters),
    "flops": ("FLOPs", lambda one: one.flops),
    "tokens": ("tokens", lambda one: one.tokens),
    "time": ("seconds of predicted time", lambda one: one.seconds or 0.0),
}


def sizes(arms: Arms, choices: Mapping[str, Choice], plugins: Plugins) -> dict[str, Plan]:
    """The size of each arm, with the values of its choice."""
    device = _device(arms.file, plugins)
    found = {}
    for arm in arms.arms:
        run = arms.cells(arm, choices[arm.name])[0].run
        if device is not None and run.config.precision not in device.tera_flops:
            raise arms.file.error(f"{device.title} does not compute in {run.config.precision}", "equal", "device")
        found[arm.name] = plan(run, device)
    return found


def _device(file: SweepFile, plugins: Plugins) -> Device | None:
    """The device of equal times; None if the sweep names none."""
    equal = file.config.equal
    if equal is None or equal.device is None:
        return None
    try:
        return find_device(equal.device, folder=Path(file.file).parent, plugins=plugins)
    except Invalid as wrong:
        raise file.error(wrong.message, "equal", "device", help=wrong.help) from None


def check_equal(arms: Arms, found: dict[str, Plan], folder: Path) -> None:
    """Raise SpecError for arms that are not as large as their baselines.

    The model of such an arm is written to the folder, for `tfkit solve` to begin with.
    """
    equal = arms.config.equal
    shares = equal.shares() if equal else {}
    if "time" in shares and any(one.seconds is None for one in found.values()):
        help = f"name one: `equal: {{time: {equal and equal.time}, device: a100}}`, or a file with its limits"
        raise arms.file.error("the limits of the run's device are not known", "equal", "time", help=help)
    errors = []
    for name, share in shares.items():
        words, of = SIZES[name]
        for arm in arms.arms:
            own, base = of(found[arm.name]), of(found[arm.base])
            if abs(own - base) > share * base:
                message = unequal(arm.name, own, words, arm.base, base)
                notes = (f"`equal` allows {100 * share:g}%",)
                span = arms.file.provenance.span(("variants", arm.variant))
                help = _help(arms, arm, name, own, base, folder)
                errors.append(Diagnostic(message, span, f"variants.{arm.variant}", notes, help))
    if errors:
        raise SpecError(*errors)


def unequal(name: str, own: float, words: str, base_name: str, base: float) -> str:
    """A sentence about two arms of which one has more of something: parameters, tokens."""
    more = f"{100 * abs(own - base) / base:.2f}% {'more' if own > base else 'fewer'}"
    return f"{name} has {_text(own)} {words}, {more} than the {_text(base)} of {base_name}"


def _text(size: float) -> str:
    return f"{size:,}" if isinstance(size, int) else f"{size:,.4g}"


def _help(arms: Arms, arm: Arm, name: str, own: float, target: float, folder: Path) -> str:
    """The way to an equal size."""
    if name == "tokens":
        return "give both the same `steps`, or both the same `tokens`"
    run = arms.cells(arm)[0].run
    if name == "time":
        return f"as much time are about {round(run.steps * target / own):,} steps"
    place = folder / "models" / f"{arm.variant}.yaml"
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
    write_file(place, render(run.graph.spec.model))
    options = f"--params {target}"
    if name == "flops":
        tokens = run.steps * run.tokens_of_step
        options = f"--flops {target} --tokens {tokens} --length {run.data.length}"
    return f"a model of that size: tfkit solve {shlex.quote(str(place))} {options}"


LETTERS = 8
"""Digits of a digest in a text."""
NONE = "none"
"""The word for a value that a run does not have."""


def unlike(base: Run, own: Run, on: str) -> list[str]:
    """The values in which the evaluations of two runs differ: `batch.length: 12 -> 8`."""
    before, after = (_evaluated(run, on) for run in (base, own))
    texts = {path: (word_of(path, before), word_of(path, after)) for path in {**before, **after}}
    return [f"{path}: {old} -> {new}" for path, (old, new) in texts.items() if old != new]


def _evaluated(run: Run, on: str) -> dict[str, Value]:
    """The values that an evaluation depends on beside the weights, by their paths."""
    split, _, kind = on.partition(".")
    evaluations = run.config.eval
    assert evaluations is not None
    metric = f"eval.metrics.{[one.kind_name() for one in evaluations.metrics].index(kind)}"
    parts = ["data", CONTENT, "batch.length", f"eval.splits.{split}", metric]
    if evaluations.splits[split].batches != "all":
        parts.append("batch.sequences")
    idle = ["batch.length" if field == "length" else f"data.{field}" for field in run.config.data.idle(split)]
    return {
        path.replace(metric, f"eval.{kind}"): value
        for path, value in run.meaning.values.items()
        if _within(path, parts) and not _within(path, idle)
    }


def _within(path: str, parts: Iterable[str]) -> bool:
    """True if a path is one of some, or inside one."""
    return f"{path}.".startswith(tuple(f"{part}." for part in parts))


def word_of(path: str, values: Mapping[str, Value]) -> str:
    """A value as YAML has it, `null` or `0.001`; `none` where there is no such value."""
    if path not in values:
        return NONE
    value = values[path]
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:LETTERS] if path.endswith(SUFFIX) else text

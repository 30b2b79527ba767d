"""The sizes of the arms of a sweep, and the promise that they are equal."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from tfkit.errors import Diagnostic, SpecError
from tfkit.spec.render import render
from tfkit.tools.common.atomic_files import write_file
from tfkit.tools.sweep.arms import Arm, Arms
from tfkit.tools.train.plan import Plan, plan

SIZES: dict[str, tuple[str, Callable[[Plan], int]]] = {
    "params": ("parameters", lambda one: one.parameters),
    "flops": ("FLOPs", lambda one: one.flops),
    "tokens": ("tokens", lambda one: one.tokens),
}


def sizes(arms: Arms, choices: dict[str, int]) -> dict[str, Plan]:
    """The size of each arm, with the values of its choice."""
    return {arm.name: plan(arms.cells(arm, choices.get(arm.name, 0))[0].run) for arm in arms.arms}


def check_equal(arms: Arms, found: dict[str, Plan], folder: Path) -> None:
    """Raise SpecError for arms that are not as large as their baselines.

    The model of such an arm is written to the folder, for `tfkit solve` to begin with.
    """
    equal = arms.config.equal
    errors = []
    for name, share in (equal.shares() if equal else {}).items():
        words, of = SIZES[name]
        for arm in arms.arms:
            own, base = of(found[arm.name]), of(found[arm.base])
            if abs(own - base) > share * base:
                more = f"{100 * abs(own - base) / base:.2f}% {'more' if own > base else 'fewer'}"
                message = f"{arm.name} has {own:,} {words}, {more} than the {base:,} of {arm.base}"
                notes = (f"`equal` allows {100 * share:g}%",)
                span = arms.file.provenance.span(("variants", arm.variant))
                help = _help(arms, arm, name, base, folder)
                errors.append(Diagnostic(message, span, f"variants.{arm.variant}", notes, help))
    if errors:
        raise SpecError(*errors)


def _help(arms: Arms, arm: Arm, name: str, target: int, folder: Path) -> str:
    """The way to an equal size."""
    if name == "tokens":
        return "give both the same `steps`, or both the same `tokens`"
    run = arms.cells(arm)[0].run
    place = folder / "models" / f"{arm.variant}.yaml"
    place.parent.mkdir(parents=True, exist_ok=True)
    write_file(place, render(run.graph.spec.model))
    options = f"--params {target}"
    if name == "flops":
        tokens = run.steps * run.tokens_of_step
        options = f"--flops {target} --tokens {tokens} --length {run.data.length}"
    return f"a model of that size: tfkit solve {shlex.quote(str(place))} {options}"

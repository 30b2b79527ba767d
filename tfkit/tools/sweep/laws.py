"""The scaling law of each variant: one arm for each size, all of them on the same seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfkit.tools.sweep.arms import Arms, Cell
from tfkit.tools.sweep.curves import curve_of
from tfkit.tools.sweep.equal import SIZES
from tfkit.tools.sweep.scaling import LEAST, Law, law_of
from tfkit.tools.train.plan import Plan


@dataclass(frozen=True)
class Scaling:
    """The law of a variant, and what it is drawn from.

    Attributes:
        name: the variant.
        words: what its sizes count: parameters, FLOPs, tokens.
        sizes: from the smallest to the largest.
        losses: for each size, those of all seeds.
        law: the law.
    """

    name: str
    words: str
    sizes: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    law: Law


def check_laws(arms: Arms, found: Mapping[str, Plan]) -> None:
    """Raise SpecError if a variant has too few sizes for a law, or several arms of one size."""
    fit = arms.config.fit
    if fit is None:
        return
    words = SIZES[fit.on][0]
    for variant, sizes in _sizes(arms, found).items():
        if len(set(sizes.values())) < len(sizes):
            message, help = f"several arms of {variant} have equally many {words}", "`tune` what is no size"
            raise arms.file.error(message, "fit", "on", help=help)
        if len(sizes) < LEAST:
            message = f"a law needs {LEAST} sizes, and {variant} has {len(sizes)}"
            raise arms.file.error(message, "fit", help="for instance `sizes: {params: [0.25M, 0.5M, 1M, 2M]}`")


def _sizes(arms: Arms, found: Mapping[str, Plan]) -> dict[str, dict[str, float]]:
    """The size of each arm, by its variant and its name, from the smallest to the largest."""
    assert arms.config.fit is not None
    of = SIZES[arms.config.fit.on][1]
    every = sorted(arms.arms, key=lambda arm: of(found[arm.name]))
    return {
        variant: {arm.name: of(found[arm.name]) for arm in every if arm.variant == variant}
        for variant in arms.file.variants
    }


def scalings(arms: Arms, complete: Mapping[str, Sequence[Cell]], found: Mapping[str, Plan]) -> list[Scaling]:
    """The laws of the variants whose every size has a run on a common seed."""
    if arms.config.fit is None:
        return []
    made = []
    for variant, sizes in _sizes(arms, found).items():
        rows = [_losses(complete[name], arms.config.fitted) for name in sizes]
        seeds = [seed for seed in arms.config.seeds if all(seed in row for row in rows)]
        losses = tuple(tuple(row[seed] for seed in seeds) for row in rows)
        if seeds:
            law = law_of(list(sizes.values()), losses)
            made.append(Scaling(variant, SIZES[arms.config.fit.on][0], tuple(sizes.values()), losses, law))
    return made


def _losses(cells: Sequence[Cell], number: str) -> dict[int, float]:
    """The last loss of each seed, as far as it is a number above 0."""
    last = {cell.seed: curve_of(cell, number).last for cell in cells}
    return {seed: value for seed, value in last.items() if 0 < value < math.inf}

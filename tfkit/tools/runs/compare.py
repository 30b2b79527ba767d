"""Comparison of the runs in folders: grouped into variants, and paired by seed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tfkit.component import Data
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.graph.run import Run, check_run
from tfkit.plugin.manager import Plugins
from tfkit.spec.folder import RUN
from tfkit.spec.read_run import RunText, resolve_run
from tfkit.spec.sweep import CompareConfig
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.diff.differences import Difference
from tfkit.tools.runs.variants import Variant, variants
from tfkit.tools.sweep.arms import Cell, check_margin, check_number, collected
from tfkit.tools.sweep.equal import SIZES, unequal, unlike
from tfkit.tools.sweep.page import differing, page
from tfkit.tools.sweep.remarks import ended_early, mixed_code
from tfkit.tools.sweep.result import Curve, Results, curve_of
from tfkit.tools.sweep.results import Side, compare
from tfkit.tools.sweep.work import is_complete
from tfkit.tools.train.plan import plan


@dataclass(frozen=True)
class Compared:
    """The results of runs.

    Attributes:
        results: as those of a sweep.
        differing: the values in which each variant differs from the baseline, by its name.
        runs: the first run of each variant by its name.
    """

    results: Results
    differing: dict[str, list[Difference]]
    runs: dict[str, Run]

    def page(self) -> str:
        """The page of the results."""
        lines = [f"baseline: {self.results.arms[0].name}"]
        return page(self.results, self.runs, of="comparison", lines=lines, origin={})


def compare_runs(
    folders: Sequence[Path], plugins: Plugins, *, shown: CompareConfig, baseline: Path | None, so_far: bool
) -> Compared:
    """Compare the runs of folders.

    Args:
        folders: the folder of each run.
        plugins: the plugins.
        shown: the number to compare, and its direction.
        baseline: one of the folders, whose variant the others are compared to; the first unless given.
        so_far: take runs that are not finished too, and the numbers of all at the last step that all have in common.

    Raises:
        SpecError: a folder has no run; or two have the same one, or numbers that are not of the same data.
    """
    on = shown.on
    cells = read_cells(folders, plugins, on)
    every = variants(_from_baseline(cells, folders[0] if baseline is None else baseline))
    check_different(every)
    check_margin(shown, len(every))
    base, *others = every
    collected(partial(check_alike, one, base, on) for one in others)
    unfinished = [cell for cell in cells if not is_complete(cell)]
    left_out = set() if so_far else {cell.folder for cell in unfinished}
    sides = [_side(one, base, on, left_out) for one in every]
    notes = [*_unequal(sides), *mixed_code(cells)]
    if not so_far:
        notes += [f"{quoted(str(one.folder))} is left out: it is not finished" for one in unfinished]
        notes += [note for side in sides for note in ended_early(side.name, side.curves, side.size.steps)]
    elif unfinished:
        step = _common_step(sides)
        sides = [replace(side, curves=[_until(curve, step) for curve in side.curves]) for side in sides]
        names = ", ".join(quoted(str(one.folder)) for one in unfinished)
        notes.append(f"not finished: {names}; all numbers are those of step {step:,}, the last that all runs have")
    arms, more = compare(sides, shown)
    results = Results(f"{on} of {len(cells)} runs", on, shown.lower, shown.margin, arms, (), (), (*more, *notes), {})
    differences = {one.name: differing(base.run, one.run) for one in others}
    return Compared(results, differences, {one.name: one.run for one in every})


def _from_baseline(cells: Sequence[Cell], folder: Path) -> list[Cell]:
    """The runs, with that of a folder first; raises SpecError if it is none of them."""
    if all(cell.folder != folder for cell in cells):
        message = f"the baseline {quoted(str(folder))} is none of the folders"
        raise SpecError(Diagnostic(message, help="name it among the runs, too"))
    return sorted(cells, key=lambda cell: cell.folder != folder)


def _side(one: Variant, base: Variant, on: str, left_out: Collection[Path]) -> Side:
    curves = [curve_of(cell, on) for cell in one.cells if cell.folder not in left_out]
    return Side(one.name, one.name, base.name, plan(one.run), curves)


def _unequal(sides: Sequence[Side]) -> Iterator[str]:
    """Remarks about variants that read more than the baseline, or less."""
    words, of = SIZES["tokens"]
    sizes = {side.name: of(side.size) for side in sides}
    for side in sides:
        if sizes[side.name] != sizes[side.base]:
            yield unequal(side.name, sizes[side.name], words, side.base, sizes[side.base])


def _common_step(sides: Sequence[Side]) -> int:
    """Return the last step that all runs were evaluated at, but for those that diverged; raise SpecError if none is."""
    steps = [set(curve.steps) for side in sides for curve in side.curves if not curve.diverged]
    common = set.intersection(*steps) if steps else set()
    if not common:
        raise SpecError(Diagnostic("there is no step that all runs were evaluated at"))
    return max(common)


def _until(curve: Curve, step: int) -> Curve:
    if curve.diverged:
        return curve
    count = curve.steps.index(step) + 1
    return replace(curve, steps=curve.steps[:count], values=curve.values[:count])


def read_cells(folders: Sequence[Path], plugins: Plugins, on: str) -> list[Cell]:
    """The runs of folders; raises SpecError with the errors of all, among them of those without that number."""
    data: dict[str, Data] = {}
    return collected(partial(_cell, folder, plugins, data, on) for folder in folders)


def _cell(folder: Path, plugins: Plugins, data: dict[str, Data], on: str) -> Cell:
    if not (folder / RUN).is_file():
        inside = folder / "runs"
        help = f"name its runs: {inside}/*" if inside.is_dir() else "name folders that `tfkit train` wrote"
        raise SpecError(Diagnostic(f"{quoted(str(folder))} is not the folder of a run", help=help))
    run = check_run(resolve_run(RunText.read(folder / RUN, plugins), plugins, known=data), count=flops_of_step)
    check_number(f"the run in {quoted(str(folder))}", run, on)
    return Cell(run, folder)


def check_different(variants: Sequence[Variant]) -> None:
    """Raise SpecError if two folders have one run."""
    for one in variants:
        seeds: dict[int, Path] = {}
        for cell in one.cells:
            other = seeds.setdefault(cell.seed, cell.folder)
            if other is not cell.folder:
                both = f"{quoted(str(other))} and {quoted(str(cell.folder))}"
                raise SpecError(Diagnostic(f"{both} have one run, of seed {cell.seed}", help="name one of them"))


def check_alike(one: Variant, base: Variant, on: str) -> None:
    """Raise SpecError if the numbers of two variants are not of the same data, read in the same way."""
    notes = unlike(base.run, one.run, on)
    if notes:
        folders = " and ".join(quoted(str(variant.cells[0].folder)) for variant in (base, one))
        raise SpecError(Diagnostic(f"{folders} are evaluated differently", notes=tuple(notes)))

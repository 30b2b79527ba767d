"""The runs in folders, and the values that they must share for their numbers to be compared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tfkit.component import Data
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.graph.run import check_run
from tfkit.plugin.manager import Plugins
from tfkit.spec.folder import RUN
from tfkit.spec.read_run import RunText, resolve_run
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.runs.variants import Variant
from tfkit.tools.sweep.alike import unlike
from tfkit.tools.sweep.arms import Cell, check_number, collected


def read_cells(folders: Sequence[Path], plugins: Plugins, on: str) -> list[Cell]:
    """The runs of folders; raises SpecError with the errors of all, among them of those without that number."""
    data: dict[str, Data] = {}
    return collected(partial(_cell, folder, plugins, data, on) for folder in folders)


def _cell(folder: Path, plugins: Plugins, data: dict[str, Data], on: str) -> Cell:
    if not os.path.isfile(folder / RUN):
        inside = folder / "runs"
        help = f"name its runs: {inside}/*" if os.path.isdir(inside) else "name folders that `tfkit train` wrote"
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

"""The runs in folders, and the values that they must share for their numbers to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tfkit.component import Data
from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.graph.run import CONTENT, Run, check_run
from tfkit.graph.run_meaning import Value
from tfkit.plugin.manager import Plugins
from tfkit.spec.folder import RUN
from tfkit.spec.read_run import RunText, resolve_run
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.runs.variants import Variant, word_of
from tfkit.tools.sweep.arms import Cell, collected, numbers_of

ORDER = "order"
"""The key of data that only training obeys."""


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
    numbers = numbers_of(run)
    if on not in numbers:
        notes = (f"numbers of its evaluations: {listing(numbers) or 'none'}",)
        message = f"the run in {quoted(str(folder))} computes no {quoted(on)}"
        raise SpecError(Diagnostic(message, notes=notes, help="name a number that all runs compute: --on NUMBER"))
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
    own, other = _evaluated(one.run, on), _evaluated(base.run, on)
    notes = [
        f"{path}: {word_of(path, other)} -> {word_of(path, own)}"
        for path in dict.fromkeys([*other, *own])
        if word_of(path, other) != word_of(path, own)
    ]
    if notes:
        folders = " and ".join(quoted(str(variant.cells[0].folder)) for variant in (base, one))
        raise SpecError(Diagnostic(f"{folders} are evaluated differently", notes=tuple(notes)))


def _evaluated(run: Run, on: str) -> dict[str, Value]:
    """The values that an evaluation depends on beside the weights, by their paths."""
    split, _, kind = on.partition(".")
    evaluations = run.config.eval
    assert evaluations is not None
    number = [metric.kind_name() for metric in evaluations.metrics].index(kind)
    parts = ["data", CONTENT, "batch.length", f"eval.splits.{split}", f"eval.metrics.{number}"]
    if evaluations.splits[split].batches != "all":
        parts.append("batch.sequences")
    return {
        path.replace(f"eval.metrics.{number}", f"eval.{kind}"): value
        for path, value in run.meaning.values.items()
        if f"{path}.".startswith(tuple(f"{part}." for part in parts)) and path.rpartition(".")[2] != ORDER
    }

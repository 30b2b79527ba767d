"""Comparison of the runs in folders: grouped into variants, and paired by seed.

Runs whose settings are equal except for the seed are a variant, named after the values that distinguish it.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.plugin.manager import Plugins
from tfkit.run.checked_run import Run, check_run
from tfkit.run.contract import Data
from tfkit.run.read_run import RunText, resolve_run
from tfkit.run.run_meaning import Value
from tfkit.run.sweep_spec import CompareConfig
from tfkit.spec.folder import RUN
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.show.differences import Difference
from tfkit.tools.sweep.arms import SweepRun, call_all, check_margin, check_number, check_objectives
from tfkit.tools.sweep.comparison import Side, compare_sides, ended_early, mixed_code
from tfkit.tools.sweep.equal import NONE, SIZES, evaluation_differences, size_difference, word_of
from tfkit.tools.sweep.page import differing_values, results_page
from tfkit.tools.sweep.result import Curve, Results, curve_of
from tfkit.tools.sweep.work import is_complete
from tfkit.tools.train.plan import run_plan


@dataclass(frozen=True)
class RunComparison:
    """The results of runs.

    Attributes:
        results: the results, as for a sweep.
        differing: the values in which each variant differs from the baseline, by its name.
        runs: the first run of each variant by its name.
    """

    results: Results
    differing: dict[str, list[Difference]]
    runs: dict[str, Run]

    def page(self) -> str:
        """Return the page of the results."""
        lines = [f"baseline: {self.results.arms[0].name}"]
        return results_page(self.results, self.runs, of="comparison", lines=lines, origin={})


def compare_runs(
    folders: Sequence[Path], plugins: Plugins, *, comparison: CompareConfig, baseline: Path | None, so_far: bool
) -> RunComparison:
    """Compare the runs of folders.

    Args:
        folders: the folder of each run.
        plugins: the plugins.
        comparison: the metric to compare, and its direction.
        baseline: a folder, whose variant all variants are compared to; by default the first.
        so_far: include unfinished runs, and compare all runs at the last step where every run was evaluated.

    Raises:
        SpecError: a folder has no run, two folders have the same run, or runs are evaluated on different data.
    """
    on = comparison.on
    runs = read_runs(folders, plugins, on)
    all_variants = run_variants(_from_baseline(runs, folders[0] if baseline is None else baseline))
    check_different(all_variants)
    check_margin(comparison, len(all_variants))
    base, *remaining = all_variants
    call_all(partial(check_comparable, variant, base, on) for variant in remaining)
    unfinished = [sweep_run for sweep_run in runs if not is_complete(sweep_run)]
    left_out = set() if so_far else {sweep_run.folder for sweep_run in unfinished}
    sides = [_side_of_variant(variant, base, on, left_out) for variant in all_variants]
    notes = [*_token_remarks(sides), *mixed_code(runs)]
    if not so_far:
        notes += [f"{quoted(str(sweep_run.folder))} is omitted: it is not finished" for sweep_run in unfinished]
        notes += [note for side in sides for note in ended_early(side.name, side.curves, side.size.steps)]
    elif unfinished:
        step = _common_step(sides)
        sides = [replace(side, curves=[_curve_until(curve, step) for curve in side.curves]) for side in sides]
        names = ", ".join(quoted(str(sweep_run.folder)) for sweep_run in unfinished)
        notes.append(f"not finished: {names}; all numbers are from step {step:,}, the last step of all runs")
    arms, more = compare_sides(sides, comparison)
    results = Results(
        f"{on} of {len(runs)} runs", on, comparison.lower, comparison.margin, arms, (), (), (), (*more, *notes), {}
    )
    differences = {variant.name: differing_values(base.run, variant.run) for variant in remaining}
    return RunComparison(results, differences, {variant.name: variant.run for variant in all_variants})


def _from_baseline(runs: Sequence[SweepRun], folder: Path) -> list[SweepRun]:
    """Return the runs, with the run of `folder` first; raise SpecError if it is not among them."""
    if all(sweep_run.folder != folder for sweep_run in runs):
        message = f"the baseline {quoted(str(folder))} must be one of the compared folders"
        raise SpecError(Diagnostic(message, help="add it to the list of folders"))
    return sorted(runs, key=lambda sweep_run: sweep_run.folder != folder)


def _side_of_variant(variant: Variant, base: Variant, on: str, left_out: Collection[Path]) -> Side:
    curves = [curve_of(sweep_run, on) for sweep_run in variant.runs if sweep_run.folder not in left_out]
    return Side(variant.name, variant.name, base.name, run_plan(variant.run), curves)


def _token_remarks(sides: Sequence[Side]) -> Iterator[str]:
    """Yield remarks about variants that train on more or fewer tokens than the baseline."""
    words, of = SIZES["tokens"]
    sizes = {side.name: of(side.size) for side in sides}
    for side in sides:
        if sizes[side.name] != sizes[side.base]:
            yield size_difference(side.name, sizes[side.name], words, side.base, sizes[side.base])


def _common_step(sides: Sequence[Side]) -> int:
    """Return the last step at which all runs except diverged runs were evaluated; raise SpecError if none exists."""
    steps = [set(curve.steps) for side in sides for curve in side.curves if not curve.diverged]
    common = set.intersection(*steps) if steps else set()
    if not common:
        raise SpecError(Diagnostic("there is no step at which all runs were evaluated"))
    return max(common)


def _curve_until(curve: Curve, step: int) -> Curve:
    if curve.diverged:
        return curve
    count = curve.steps.index(step) + 1
    return replace(curve, steps=curve.steps[:count], values=curve.values[:count])


def read_runs(folders: Sequence[Path], plugins: Plugins, on: str) -> list[SweepRun]:
    """Read the runs of folders; raise SpecError with the errors of all runs.

    Every run must report the metric `on`.
    """
    data: dict[str, Data] = {}
    runs = call_all(partial(_read_run, folder, plugins, data, on) for folder in folders)
    check_objectives((sweep_run.run for sweep_run in runs), on)
    return runs


def _read_run(folder: Path, plugins: Plugins, data: dict[str, Data], on: str) -> SweepRun:
    if not os.path.isfile(folder / RUN):
        inside = folder / "runs"
        help = (
            f"name its runs: {shlex.quote(str(inside))}/*"
            if os.path.isdir(inside)
            else "name folders that `tfkit train` wrote"
        )
        raise SpecError(Diagnostic(f"{quoted(str(folder))} is not the folder of a run", help=help))
    run = check_run(resolve_run(RunText.read(folder / RUN, plugins), plugins, loaded=data), count=flops_of_step)
    check_number(f"the run in {quoted(str(folder))}", run, on)
    return SweepRun(run, folder)


def check_different(variants: Sequence[Variant]) -> None:
    """Raise SpecError if two folders contain the same run."""
    for variant in variants:
        seeds: dict[int, Path] = {}
        for sweep_run in variant.runs:
            earlier = seeds.setdefault(sweep_run.seed, sweep_run.folder)
            if earlier is not sweep_run.folder:
                both = f"{quoted(str(earlier))} and {quoted(str(sweep_run.folder))}"
                raise SpecError(
                    Diagnostic(f"{both} contain the same run, of seed {sweep_run.seed}", help="remove one of them")
                )


def check_comparable(variant: Variant, base: Variant, on: str) -> None:
    """Raise SpecError if two variants are not evaluated on the same data in the same way."""
    notes = evaluation_differences(base.run, variant.run, on)
    if notes:
        folders = " and ".join(quoted(str(side.runs[0].folder)) for side in (base, variant))
        raise SpecError(Diagnostic(f"{folders} are evaluated differently", notes=tuple(notes)))


SEED = "seed"
KINDS = ("kind", "block")
"""Keys whose values identify a component better than the fields next to them."""


@dataclass(frozen=True)
class Variant:
    """Runs with equal settings, one for each seed."""

    name: str
    runs: tuple[SweepRun, ...]

    @property
    def run(self) -> Run:
        """The first run."""
        return self.runs[0].run


def run_variants(runs: Iterable[SweepRun]) -> list[Variant]:
    """Group runs into variants, in the order of their first runs."""
    groups: dict[str, list[SweepRun]] = {}
    for sweep_run in runs:
        groups.setdefault(json.dumps(sorted(_values_without_seed(sweep_run.run).items())), []).append(sweep_run)
    names = _variant_names([group[0].run for group in groups.values()])
    return [Variant(name, tuple(group)) for name, group in zip(names, groups.values(), strict=True)]


def _variant_names(runs: Sequence[Run]) -> list[str]:
    """Name each run after the values in which it differs from the first run; a single run keeps its name.

    The first run is named after its values at those paths, which distinguish all runs.
    """
    if len(runs) == 1:
        return [runs[0].config.name]
    values = [_values_without_seed(run) for run in runs]
    paths = _distinguishing_paths(values)
    labels = _path_labels(paths, values)
    first = [word_of(path, values[0]) for path in paths]
    names = []
    for number, run_values in enumerate(values):
        words = [word_of(path, run_values) for path in paths]
        differing = [word != other for word, other in zip(words, first, strict=True)]
        if number == 0:
            differing = [word != NONE for word in words]
        parts = [f"{label} {word}".strip() for label, word, keep in zip(labels, words, differing, strict=True) if keep]
        names.append(", ".join(parts) or f"{labels[0]} {words[0]}")
    return names


def _distinguishing_paths(values: Sequence[Mapping[str, Value]]) -> list[str]:
    """Choose paths whose values distinguish all runs, kinds first; skip paths that do not distinguish more runs."""
    paths = sorted(
        dict.fromkeys(path for run_values in values for path in run_values), key=lambda path: not _is_kind(path)
    )
    chosen: list[str] = []
    groups = 1
    for path in paths:
        finer = len({tuple(word_of(name, run_values) for name in (*chosen, path)) for run_values in values})
        if finer > groups:
            chosen, groups = [*chosen, path], finer
    return chosen


def _values_without_seed(run: Run) -> dict[str, Value]:
    return {path: value for path, value in run.semantics.values.items() if path != SEED}


def _is_kind(path: str) -> bool:
    return path.rpartition(".")[2] in KINDS


def _path_labels(paths: Sequence[str], values: Sequence[Mapping[str, Value]]) -> list[str]:
    """Return the label before the value of each path: its last key, or no label for a kind that all runs have."""
    keys = [_last_key(path) for path in paths]
    shared = {path for path in paths if _is_kind(path) and all(path in run_values for run_values in values)}
    labels = [path if keys.count(key) > 1 else key for path, key in zip(paths, keys, strict=True)]
    return ["" if path in shared else label for path, label in zip(paths, labels, strict=True)]


def _last_key(path: str) -> str:
    """Return the last key of a path, or the slot of a kind; an index in a list keeps the key before it."""
    keys = path.split(".")[: -1 if _is_kind(path) else None]
    start = next(index for index in range(len(keys) - 1, -1, -1) if not keys[index].isdigit())
    return ".".join(keys[start:])

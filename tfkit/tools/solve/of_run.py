"""The sizes of a run's model: all of them, and the largest that fit the memory of the run's processes.

The plan of the run predicts the memory of a size. The memory grows with the layers and with d_model, so each shape has
a largest size that fits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Self

from tfkit.errors import Diagnostic, SpecError
from tfkit.plugin.manager import Plugins
from tfkit.run.checked_run import Run, check_run
from tfkit.run.read_run import RunText, model_of_run, resolve_run
from tfkit.run.run_spec import RunSpec
from tfkit.spec.document import MODEL
from tfkit.spec.read_document import find_document, of_model
from tfkit.spec.tree import Mapping as Tree
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.solve.budget import Memory, Size, Solved, parameters_of
from tfkit.tools.solve.search import KINDS, Form, Grid, GridPoint
from tfkit.tools.solve.sizes import Family
from tfkit.tools.solve.solve import grid_of, size_of
from tfkit.tools.train.per_process import PerProcess, per_process
from tfkit.tools.train.plan import states_of

SECANTS = 6
"""Number of secant steps in a search, after which it bisects."""


@dataclass(frozen=True)
class SizedRun:
    """A run whose model varies.

    Attributes:
        run: the run with its model.
        tree: the model as a spec, without changes of its values.
        family: the sizes of the model.
        sets: the changes of the run, as `--set` takes them, without changes inside its model.
    """

    run: Run
    tree: Tree
    family: Family
    sets: tuple[str, ...]

    @classmethod
    def of(cls, name: str, plugins: Plugins, *, sets: Iterable[str] = (), keep: Iterable[str] = ()) -> Self:
        """Read a run by its path, its folder or its name; raises SpecError. `sets` and `keep` are as for `Family`."""
        changes, path = [change.strip() for change in sets], find_document(name, RunSpec, plugins.specs)
        inside = [change for change in changes if change.startswith(f"{MODEL}.")]
        outside = [change for change in changes if change not in inside]
        run = check_run(resolve_run(RunText.read(path, plugins, sets=changes), plugins), count=flops_of_step)
        text = RunText.read(path, plugins, sets=outside)
        with of_model():
            tree = model_of_run(text, run.data)
            of_values = [change.removeprefix(f"{MODEL}.") for change in inside]
            return cls(run, tree, Family(tree, text.file, plugins, sets=of_values, keep=keep), tuple(outside))

    def changes(self, sets: Iterable[str]) -> tuple[str, ...]:
        """Return the changes of the run for changes of its model, as `--set` takes them."""
        return (*self.sets, *(f"{MODEL}.{change}" for change in sets))

    def largest(self, memory: Memory) -> Solved:
        """Find the largest sizes whose processes fit a memory, one for each kind of shape.

        Raises SpecError if even the smallest size is too large, or if the run cannot train with a size.
        """
        family, optimizer = self.family, states_of(self.run)

        @cache
        def plan(depth: int, width: int) -> PerProcess:
            graph = family.load(family.changes(depth, width))
            return per_process(replace(self.run, graph=graph), memory.processes, optimizer)

        grid = grid_of(family, Form(family, lambda *size: parameters_of(family.load(family.changes(*size)))[0]))
        points = SizeSearch(grid, memory.amount, plan).points()
        if not points:
            raise self._too_large(memory, grid.smallest(), plan(grid.smallest().depth, grid.smallest().width))
        sizes = tuple(size_of(family, point, memory, plan(point.depth, point.width).peak) for point in points)
        for point, size in zip(points, sizes, strict=True):
            self._check(point, size)
        return Solved(family.own.name, memory, sizes)

    def _check(self, point: GridPoint, size: Size) -> None:
        """Raise SpecError if the run cannot train with a size, such as for a pattern of recomputed layers."""
        spec = self.family.load(self.family.changes(point.depth, point.width)).spec
        try:
            check_run(replace(self.run.file, model=spec), count=self.run.count)
        except SpecError as error:
            note = f"for the largest size that fits, with {_size_text(size)}"
            raise SpecError(*(replace(item, notes=(*item.notes, note)) for item in error.diagnostics)) from error

    def _too_large(self, memory: Memory, smallest: GridPoint, needs: PerProcess) -> SpecError:
        count = f"each of {memory.processes:,} processes" if memory.processes > 1 else "a single process"
        size = size_of(self.family, smallest, memory, needs.peak)
        largest = max(needs.parts, key=needs.parts.__getitem__)
        notes = (
            f"the smallest size needs {memory.text(needs.peak)}, with {_size_text(size)}",
            f"{memory.text(needs.parts[largest])} of them are {largest}",
        )
        help = "use more memory or processes, shorter examples, or a smaller `machine.micro_batch`"
        message = f"no size of {self.family.own.name} fits {memory.text(memory.amount)} in {count}"
        return SpecError(Diagnostic(message, None, "", notes, help))


def _size_text(size: Size) -> str:
    return f"n_layers {' + '.join(map(str, size.n_layers.values()))} and d_model {size.d_model}"


class SizeSearch:
    """The search of a grid for the largest sizes whose peak is within a budget."""

    def __init__(self, grid: Grid, budget: float, plan: Callable[[int, int], PerProcess]) -> None:
        self._grid, self._budget, self._plan = grid, budget, plan
        self._smallest = grid.smallest()
        self._base = plan(self._smallest.depth, self._smallest.width)
        states = self._base.weights + self._base.gradients + self._base.states
        self._target = self._smallest.value * budget / states
        """Estimated number of parameters that fill the budget. The first estimate counts only optimizer states."""

    def points(self) -> list[GridPoint]:
        """Return the largest size of each kind of shape, ordered by distance from the family's; empty if none fits."""
        grid = self._grid
        if self._base.peak > self._budget:
            return []
        if grid.width is not None:
            largest = [self._fitting(grid.depths, partial(grid.point, width=grid.width))]
        elif len(grid.depths) == 1:
            largest = [self._fitting(grid.all_widths, partial(grid.point, grid.depths[0]))]
        else:
            largest = [self._of_kind(kind) for kind in sorted(range(-KINDS, KINDS + 1), key=abs)]
        return sorted(filter(None, largest), key=lambda point: abs(grid.shape_of(point))) or [self._smallest]

    def _of_kind(self, kind: int) -> GridPoint | None:
        """Return the largest size of a kind of shape; None if none fits.

        Its width is the largest with which the shape in the middle of the kind fits, or the next width, with fewer
        layers.
        """
        grid, widths = self._grid, self._grid.all_widths
        middle = self._fitting(widths, partial(grid.of_shape, kind))
        best = middle if middle and grid.kind_of(middle) == kind else None
        index = middle.width - widths[0] if middle else 0
        for width in widths[index : index + 2]:
            depths = grid.depths_of(kind, width, best.value if best else 0)
            best = self._fitting(depths, partial(grid.point, width=width)) or best
        return best

    def _fitting(self, numbers: range, size: Callable[[int], GridPoint]) -> GridPoint | None:
        """Return the last size that fits, None if none does. Sizes must not decrease with their number."""
        low, high, steps = -1, len(numbers), 0
        while high - low > 1:
            index = bisect_right(numbers, self._target, key=lambda number: size(number).value) - 1
            index = max(low + 1, min(index, high - 1)) if steps < SECANTS else (low + high) // 2
            point, steps = size(numbers[index]), steps + 1
            peak = self._plan(point.depth, point.width).peak
            low, high = (index, high) if peak <= self._budget else (low, index)
            if point.value > self._smallest.value and peak > self._base.peak:
                slope = (point.value - self._smallest.value) / (peak - self._base.peak)
                self._target = point.value + (self._budget - peak) * slope
        return None if low < 0 else size(numbers[low])

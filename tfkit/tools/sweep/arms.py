"""Arms of a sweep: each variant at each size and grid point, with its runs. The sweep may set sizes and lengths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from tfkit.commands import count_text
from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.graph.expand import expand
from tfkit.plugin.manager import Plugins
from tfkit.run.checked_run import Run, check_run, mean_length
from tfkit.run.contract import Data
from tfkit.run.parametrization import PARAMETRIZATION
from tfkit.run.read_run import LOSS, RunFile, RunText, model_of_run, resolve_run
from tfkit.run.read_sweep import Setting, SweepFile
from tfkit.run.run_code import Code, code_of
from tfkit.run.sweep_spec import PARAMS, CompareConfig
from tfkit.spec.arithmetic import ExpressionError, Number, evaluate
from tfkit.spec.document import MODEL
from tfkit.spec.merge import Change, change_of
from tfkit.spec.messages import expression_span, unknown_name
from tfkit.spec.read_document import of_model
from tfkit.spec.source import plain_data
from tfkit.spec.tree import Mapping as Tree
from tfkit.spec.tree import Node, Scalar
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.solve.budget import Budget, parameters_of
from tfkit.tools.solve.sizes import Family, node_at
from tfkit.tools.solve.solve import sizes_of
from tfkit.tools.solve.vary import vary_value

T = TypeVar("T")
LETTERS = 16
"""Digits of a run's digest in the name of its folder."""


@dataclass(frozen=True)
class SweepRun:
    """A run and its folder. Without `allow_change`, a folder that was trained by different code is an error."""

    run: Run
    folder: Path
    allow_change: bool = True

    @cached_property
    def code(self) -> Code:
        """Digests of the current code of the run's kinds."""
        return code_of(self.run)

    @property
    def sweep_folder(self) -> Path:
        """The folder of the sweep, which contains the run folder in `runs`."""
        return self.folder.parents[1]

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.run.config.seed


@dataclass(frozen=True)
class Choice:
    """A value for each setting of the grid or of tuning, by path; empty without settings."""

    values: dict[str, Any] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()

    def words(self) -> str:
        """Return the values as text: `lr 0.001, sequences 8`."""
        return ", ".join(f"{path.rpartition('.')[2]} {_value_text(value)}" for path, value in self.values.items())


EMPTY_CHOICE = Choice()
"""The choice of an arm without tuning."""


@dataclass(frozen=True)
class Trial:
    """Values to try, and a run with these values on each tuning seed."""

    choice: Choice
    runs: list[SweepRun]


@dataclass(frozen=True)
class Arm:
    """A variant at one size and one point of the grid.

    Attributes:
        name: the variant, its size if the sweep has several, and the point if there is a grid.
        variant: the name of the variant.
        base: the name of the arm that it is compared to, of the same size and point. A baseline names itself.
        tuned_as: the name of the arm whose tuned values it has; its name, unless only the first size is tuned.
        text: the run, not resolved, without tuned values.
    """

    name: str
    variant: str
    base: str
    tuned_as: str
    text: RunText


class Arms:
    """The arms of a sweep, and the runs of each; raises SpecError with the errors of all runs."""

    def __init__(self, file: SweepFile, plugins: Plugins, folder: Path, *, allow_change: bool = False) -> None:
        self.file, self.config, self._allow_change = file, file.config, allow_change
        self._plugins, self._folder = plugins, folder / "runs"
        self._data: dict[str, Data] = {}
        self._sizes = all_sizes(file)
        points = itertools.product(file.variants, self._sizes, all_choices(file.grid))
        self.arms: list[Arm] = call_all(self._arm(*point) for point in points)
        self._runs: dict[tuple[str, str], list[SweepRun]] = {}
        if not file.tuned:
            call_all(partial(self.runs, arm) for arm in self.arms)
        _check_names(file, self.arms)

    def runs(self, arm: Arm, choice: Choice = EMPTY_CHOICE) -> list[SweepRun]:
        """Return the runs of an arm, one for each seed, with the values of a choice."""
        key = arm.name, repr(choice.values)
        if key not in self._runs:
            text = self._lengthened(self._chosen(arm.text, choice))
            self._runs[key] = [self._sweep_run(text, seed) for seed in self.config.seeds]
        return self._runs[key]

    def trial(self, arm: Arm, choice: Choice) -> Trial:
        """Return the trial of a choice: its runs on the tuning seeds."""
        tune = self.config.tune
        assert tune is not None
        text = self._chosen(arm.text, choice)
        if tune.steps is None:
            text = self._lengthened(text)
        else:
            text = text.of_length(Scalar(tune.steps, text.root.span), of="steps")
        return Trial(choice, [self._sweep_run(text, seed) for seed in tune.seeds])

    def arm(self, name: str) -> Arm:
        """Return the arm with this name."""
        return next(arm for arm in self.arms if arm.name == name)

    def _arm(self, variant: str, size: SweepSize, point: Choice) -> Callable[[], Arm]:
        def build() -> Arm:
            tune = self.config.tune
            tuned_size = size if tune is None or tune.at == "each" else self._sizes[0]
            where, tuned_where = (
                "".join(f", {word}" for word in (of_arm.name(), point.words()) if word) for of_arm in (size, tuned_size)
            )
            base, text = self.config.base_of(variant), self._text(variant, size, point)
            return Arm(f"{variant}{where}", variant, f"{base}{where}", f"{variant}{tuned_where}", text)

        return build

    def _text(self, variant: str, size: SweepSize, point: Choice) -> RunText:
        """Return the run of a variant, with its size and the values of a point of the grid."""
        text, base, equal = self.file.variants[variant], self.config.base_of(variant), self.config.equal
        text = self._chosen(text, point)
        if self._sizes != [NO_SIZE]:
            first, changes = (self._size_changes(text, of_size) for of_size in (self._sizes[0], size))
            small = self._chosen(text, Choice(changes=first))
            text = based_run(self._chosen(text, Choice(changes=changes)), small, changes, self._plugins)
        if equal is not None and equal.by is not None and variant != base:
            text = equalled_run(text, self._text(base, size, point), self.file, self._plugins, self._data)
        return text

    def _size_changes(self, text: RunText, size: SweepSize) -> tuple[Change, ...]:
        """Return the changes that give a run a size."""
        if size.params is None:
            return size.changes
        return size_changes(based_run(text, text, (), self._plugins), size.params, self.file, self._plugins, self._data)

    def _chosen(self, text: RunText, choice: Choice) -> RunText:
        for change in choice.changes:
            text = text.assigned(change, self._plugins)
        return text

    def _lengthened(self, text: RunText) -> RunText:
        return lengthened_run(text, self.file, self._plugins, self._data)

    def _sweep_run(self, text: RunText, seed: int) -> SweepRun:
        span = text.root.span
        seeded = text.assigned(Change((("seed", span),), Scalar(seed, span)), self._plugins)
        run = check_run(resolve_run(seeded, self._plugins, loaded=self._data), self._plugins, count=flops_of_step)
        _check_number(self.file, run)
        return SweepRun(run, self._folder / run.digest[:LETTERS], self._allow_change)


def all_choices(settings: Sequence[Setting]) -> Iterator[Choice]:
    """Yield each combination of the listed values."""
    for changes in itertools.product(*(setting.values for setting in settings)):
        yield Choice(
            {setting.path: plain_data(change.value) for setting, change in zip(settings, changes, strict=True)}, changes
        )


def call_all(makers: Iterable[Callable[[], T]]) -> list[T]:
    """Call every function and return the results.

    If any raise SpecError, raise one SpecError with all of their errors.
    """
    results: list[T] = []
    errors: list[Diagnostic] = []
    for make in makers:
        try:
            results.append(make())
        except SpecError as error:
            errors += error.diagnostics
    if errors:
        raise SpecError(*errors)
    return results


def _check_names(file: SweepFile, arms: Sequence[Arm]) -> None:
    """Raise SpecError if two arms have the same name, because their values are equal or nearly equal."""
    names = [arm.name for arm in arms]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise file.error(
            f"two run variants cannot have the same name, {quoted(twice)}", "grid" if file.grid else "sizes"
        )


def check_number(name: str, run: Run, on: str) -> None:
    """Raise SpecError if the evaluations of a run do not report the metric `on`; `name` appears in the error."""
    numbers = run.metric_names
    if on not in numbers:
        notes = (f"reported metrics: {listing(numbers) or 'none'}",)
        help = "choose a metric that every run reports: --on METRIC"
        raise SpecError(Diagnostic(f"{name} does not report the metric {quoted(on)}", notes=notes, help=help))


def check_objectives(runs: Iterable[Run], on: str) -> None:
    """Raise SpecError if runs with different losses are compared by their objective."""
    losses = [(run.config.loss, {path: n for path, n in run.by_step.items() if path[0] == LOSS}) for run in runs]
    if on.rpartition(".")[2] == "objective" and any(loss != losses[0] for loss in losses):
        message = f"{quoted(on)} must be compared between runs with equal losses; the runs differ in `loss`"
        raise SpecError(Diagnostic(message, help="compare a metric that does not depend on `loss`, such as `accuracy`"))


def check_margin(comparison: CompareConfig, variants: int) -> None:
    """Raise SpecError for a margin if there are too few variants to compare."""
    if comparison.margin is not None and variants == 1:
        raise SpecError(
            Diagnostic("`margin` has no effect: there is one variant", help="compare two variants, or remove `margin`")
        )


def _check_number(file: SweepFile, run: Run) -> None:
    """Raise SpecError if a run does not report the metrics that the sweep compares and fits."""
    names, on = run.metric_names, file.config.compare.on
    if not names:
        help = "add one, for instance `eval: {every: 500, splits: {val: all}}`"
        message = f"the run has no `eval`, and so no {quoted(on)} to compare"
        raise SpecError(Diagnostic(message, file.provenance.span(("compare", "on")), "compare.on", help=help))
    for number, *path in ((on, "compare", "on"), (file.config.fitted, "fit", "loss")):
        if number not in names:
            notes = (f"reported metrics: {', '.join(names)}",)
            raise file.error(f"the run does not report the metric {quoted(number)}", *path, notes=notes)


def _value_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class SweepSize:
    """A size of a sweep: a number of parameters, or changes of paths; neither if the sweep has no sizes."""

    params: int | None = None
    changes: tuple[Change, ...] = ()

    def name(self) -> str:
        """Return the number of parameters or the value of the first path as text: `64K`, `d_model 128`."""
        if self.params is not None:
            return count_text(self.params).replace(".0", "")
        return "".join(f"{change.steps[-1][0]} {_value_text(plain_data(change.value))}" for change in self.changes[:1])


NO_SIZE = SweepSize()
"""The only size of a sweep without sizes."""


def all_sizes(file: SweepFile) -> list[SweepSize]:
    """Return the sizes of a sweep."""
    if PARAMS in file.config.sizes:
        return [SweepSize(params) for params in file.config.sizes[PARAMS]]
    if not file.sizes:
        return [NO_SIZE]
    return [SweepSize(changes=changes) for changes in zip(*(setting.values for setting in file.sizes), strict=True)]


def based_run(text: RunText, small: RunText, changes: Sequence[Change], plugins: Plugins) -> RunText:
    """Return the run with the sizes of a small run as the base of its parametrization, if it has none.

    `changes` are the changes that gave the run its size.
    """
    node = text.root.items.get(PARAMETRIZATION)
    fields = node.items if isinstance(node, Tree) else {} if node is None else {"kind": node}
    kind = fields.get("kind")
    if "base" in fields or not isinstance(kind, Scalar) or kind.value in (None, "standard"):
        return text
    sizes, span = dict[str, Node](), text.root.keys[PARAMETRIZATION]
    for change in changes:
        keys = tuple(key for key, _ in change.steps)
        value = node_at(small.root, keys) or node_at(small.root, (keys[0], "graph", *keys[1:]))
        if keys[0] == MODEL and value is not None:
            sizes[".".join(keys)] = value
    base = Tree(sizes, dict.fromkeys(sizes, span), span)
    tree = Tree({**fields, "base": base}, dict.fromkeys((*fields, "base"), span), span)
    return text.assigned(Change(((PARAMETRIZATION, span),), tree), plugins)


def size_changes(
    text: RunText, params: int, file: SweepFile, plugins: Plugins, loaded: dict[str, Data]
) -> tuple[Change, ...]:
    """Return the changes to the size of a model's family that is nearest to a number of parameters."""
    data = resolve_run(text, plugins, loaded=loaded).data
    try:
        with of_model():
            family = Family(model_of_run(text, data), text.file, plugins)
            changes = sizes_of(family, Budget("params", params)).sizes[0].sets
    except SpecError as error:
        span = file.provenance.span(("sizes", "params"))
        diagnostics = [replace(item, span=item.span or span, path="sizes.params") for item in error.diagnostics]
        raise SpecError(*diagnostics) from error
    return tuple(change_of(f"{MODEL}.{change}") for change in changes)


NAMES = ("params", "flops")


def equalled_run(text: RunText, base: RunText, file: SweepFile, plugins: Plugins, loaded: dict[str, Data]) -> RunText:
    """Return the run with as many parameters as `base`, by the number of the model that `equal.by` names.

    A run whose parameters already are equal enough does not change.
    """
    equal = file.config.equal
    assert equal is not None
    assert equal.by is not None
    models = [resolve_run(run, plugins, loaded=loaded).model for run in (base, text)]
    target, parameters = (parameters_of(expand(model))[0] for model in models)
    if abs(parameters - target) <= equal.shares()["params"] * target:
        return text
    path = equal.by.removeprefix(f"{MODEL}.")
    data = resolve_run(text, plugins, loaded=loaded).data
    try:
        solved = vary_value(model_of_run(text, data), text.file, plugins, path, Budget("params", target))
    except SpecError as error:
        span = file.provenance.span(("equal", "by"))
        raise SpecError(*(replace(item, span=span, path="equal.by") for item in error.diagnostics)) from error
    return text.assigned(change_of(f"{MODEL}.{solved.sizes[0].sets[-1]}"), plugins)


def lengthened_run(text: RunText, file: SweepFile, plugins: Plugins, loaded: dict[str, Data]) -> RunText:
    """Return the run with the number of tokens that the sweep sets; unchanged if the sweep sets none."""
    if file.tokens is None:
        return text
    run = resolve_run(text, plugins, loaded=loaded)
    tokens = _token_count(file, file.tokens, run)
    return text.of_length(Scalar(tokens, file.tokens.span), of="tokens")


def _token_count(file: SweepFile, node: Scalar, run: RunFile) -> int:
    """Evaluate `tokens` of the sweep for a run. Raise SpecError with the location of the error."""
    span, help = (
        node.span,
        "`params` is the model's parameter count, `flops` the FLOPs of one token, forward and backward",
    )
    try:
        tokens = evaluate(str(node.value), lambda name: _size_of_run(name, run))
    except ExpressionError as error:
        span = expression_span(span, str(node.value), error.columns)
        raise SpecError(Diagnostic(f"`tokens`: {error}", span, "tokens", error.notes, error.help or help)) from None
    if tokens < 1:
        raise SpecError(Diagnostic(f"`tokens` must be enough for a step; got {tokens:g}", span, "tokens", help=help))
    return math.ceil(tokens)


def _size_of_run(name: str, run: RunFile) -> Number:
    """Return the value of `params` or `flops` for a run."""
    if name not in NAMES:
        raise unknown_name(name, NAMES)
    with of_model():
        graph = expand(run.model)
    if name == "params":
        return parameters_of(graph)[0]
    length = math.ceil(mean_length(run.data))
    return flops_of_step(graph, 1, length) / length

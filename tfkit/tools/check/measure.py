"""Properties, their subjects, the deviations that they measure, the comparison of two runs, and outcomes."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, fx

from tfkit.building.builder import evaluation_mode
from tfkit.component import Component
from tfkit.errors import Diagnostic, EditedModelWarning, FirstLossWarning, SpecError
from tfkit.graph.expand import Graph
from tfkit.plugin.manager import Plugins
from tfkit.tools.check.runs import Inputs, eval_outputs
from tfkit.tools.compare.comparison import Outputs, module_outputs
from tfkit.torch_private import MissingNameError

TOLERANCE = 1e-5
"""Largest difference that counts as rounding, relative to the largest value if it is above 1."""

ILL_CONDITIONED = 4.0
"""Largest factor of a limit for models that amplify the rounding of their weights."""

Level: TypeAlias = Literal["quick", "full"]
Status: TypeAlias = Literal["ok", "failed", "does not apply", "not run"]


class DoesNotApplyError(Exception):
    """Raised if a property does not apply to a model; the message is the reason."""


class UnsupportedError(DoesNotApplyError):
    """Raised if the code of a component rules a property out. In the tests of a plugin, the property is broken."""


EDITED = "it needs a new build of the spec, and the modules of the model were changed"


def without_formula(kinds: Iterable[tuple[str, str]]) -> str:
    """Return the reason why kinds, each with its slot, are not compared with a formula, and the remedy."""
    names = ", ".join(dict.fromkeys(f"no {slot} `{kind}`" for slot, kind in kinds))
    return f"the reference has {names}; a plugin adds a formula by its hook `tfkit_reference`, a test by `reference=`"


def require(condition: object, reason: str) -> None:
    """Raise `DoesNotApplyError` with a reason if a condition is false."""
    if not condition:
        raise DoesNotApplyError(reason)


@dataclass(frozen=True)
class Deviation:
    """A deviation from a property.

    Attributes:
        error: its size; NaN counts as infinite.
        detail: a description of the deviation, as part of a sentence.
        limit: the largest error that is allowed.
        where: the component where it arises, or a function that finds it, called only if the error is too large.
    """

    error: float
    detail: str
    limit: float = TOLERANCE
    where: str | Callable[[], str] = ""

    @property
    def broken(self) -> bool:
        """True if the deviation is larger than allowed."""
        return not self.error <= self.limit

    @classmethod
    def fault(cls, detail: str, component: str = "") -> Deviation:
        """Return a deviation without a size."""
        return cls(float("inf"), detail, where=component)


Measure: TypeAlias = Callable[[Any], Iterable[Deviation]]
"""A function that measures a `ModelUnderTest`, or a subject of a plugin."""


@dataclass(frozen=True)
class Property:
    """A property of a model, or of a subject of a plugin.

    Attributes:
        name: the word for it, as `--only` takes it.
        claim: the property in a few words, of which the model is the subject: `reads no later token`.
        measure: yields the deviations of a model, including allowed deviations; raises `DoesNotApplyError` with the
            reason if the property does not apply. Any other error is a failure. Its docstring describes the property.
        level: `quick`, or `full` for a property whose measurement takes seconds.
        basic: true if all other properties depend on it.
        of_weights: false for a property of initial weights, which trained weights do not have.
        of_spec: true for a property whose measurement builds the spec. It does not apply to an edited model.
        follows: names of other properties. If one of them is broken, this property is not run.
        of: `model`, or the `name` of the `SubjectType` that the property measures.
        compares: returns the part of a subject that the property compares with independent code, such as
            `the arithmetic`, or an empty text if the subject has no such part. If the property is not measured or does
            not apply, the last line of `tfkit check` names the part.
    """

    name: str
    claim: str
    measure: Measure
    level: Level = "quick"
    basic: bool = False
    of_weights: bool = True
    of_spec: bool = False
    follows: tuple[str, ...] = ()
    of: str = "model"
    compares: Callable[[Any], str] = lambda subject: ""


class Subject(Protocol):
    """A subject of a plugin, such as a run: the object that its properties measure."""

    @property
    def of(self) -> str:
        """The name of its `SubjectType`."""

    @property
    def name(self) -> str:
        """The name of its document."""

    @property
    def words(self) -> str:
        """A summary of the reduced subject."""

    @property
    def graph(self) -> Graph:
        """The model inside; its properties are also measured."""

    @property
    def notes(self) -> Sequence[Diagnostic]:
        """Warnings about its document."""


class SubjectType(ABC):
    """A type of subject that `tfkit check` measures in addition to models, such as a run.

    A plugin returns it from the hook `tfkit_properties`, with the properties that have its name as `of`.

    Attributes:
        name: the word for a subject.
        slots: the slots whose kinds are checked in small subjects.
        further_slots: the slots of other kinds of a subject, which cannot be checked alone.
    """

    name: ClassVar[str]
    slots: ClassVar[tuple[str, ...]] = ()
    further_slots: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def read(
        self, spec: Any, plugins: Plugins, *, sets: Sequence[str] = (), seed: int = 0, kinds: Any = None
    ) -> Subject:
        """Read a document and return its reduced subject; raise SpecError if it has errors.

        Args:
            spec: the name or path of the document, or a mapping.
            plugins: the plugins to read it with.
            sets: changes of values, as `--set` takes them.
            seed: of all random numbers.
            kinds: reference functions by slot and kind, in addition to the functions of the hook `tfkit_reference`.
        """

    @abstractmethod
    def around(
        self,
        config: type[Component],
        plugins: Plugins,
        *,
        options: Mapping[str, Sequence[Any]],
        fields: Mapping[str, Any] | None = None,
        seed: int = 0,
        reference: Callable[..., Any] | None = None,
    ) -> Mapping[str, Subject]:
        """Return small subjects around a component by description, with all pairs of option values.

        Combinations of options that the component rejects are omitted. Raises SpecError if all are rejected.
        """


@dataclass(frozen=True)
class Outcome:
    """The result of a property for one model.

    Attributes:
        name: the name of the property.
        claim: the property in a few words.
        status: `ok`, `failed`, `does not apply`, or `not run`.
        worst: the largest deviation; None if nothing was measured, or if it has no size.
        component: the path of the component where the worst deviation arises.
        detail: a description of the deviation, or the reason why the property does not apply or was not run.
        seconds: the time that it took.
    """

    name: str
    claim: str
    status: Status
    worst: float | None = None
    component: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def fault(self) -> str:
        """The description of the deviation, with the component where it arises."""
        return self.detail if self.component in self.detail else f"{self.component}: {self.detail}"


def property_of(name: str, claim: str, **options: Any) -> Callable[[Measure], Property]:
    """Turn a function that measures a model into a property."""
    return lambda measure: Property(name, claim, measure, **options)


def outcome_of(check: Property, subject: object, *, strict: bool = False) -> Outcome:
    """Measure a property. An exception is a failure, with `strict` also an `UnsupportedError`.

    A warning about the first loss is ignored.
    """
    outcome = Outcome(check.name, check.claim, "ok")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FirstLossWarning)
            warnings.simplefilter("ignore", EditedModelWarning)
            for measurement in check.measure(subject):
                if measurement.broken:
                    size, where = measurement.error if math.isfinite(measurement.error) else None, measurement.where
                    location = where if isinstance(where, str) else where()
                    return replace(outcome, status="failed", worst=size, component=location, detail=measurement.detail)
                outcome = replace(outcome, worst=max(outcome.worst or 0.0, measurement.error))
    except MissingNameError as missing:
        return replace(outcome, status="does not apply", worst=None, detail=missing.diagnostics[0].message)
    except DoesNotApplyError as reason:
        broken = strict and isinstance(reason, UnsupportedError)
        return replace(outcome, status="failed" if broken else "does not apply", worst=None, detail=str(reason))
    except Exception as error:
        return replace(outcome, status="failed", worst=None, component=location_of(error), detail=in_words(error))
    return outcome


def location_of(error: Exception) -> str:
    """Return the module that the notes of a model's error name."""
    notes = getattr(error, "__notes__", [])
    return next((note.removeprefix("in ") for note in notes if note.startswith("in ")), "")


def relative_distance(result: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value if it is above 1; infinite for NaN."""
    if not result.numel():
        return 0.0
    result, expected = result.detach(), expected.detach()
    gap = (result - expected).abs().max() / expected.abs().max().clamp(min=1)
    return float("inf") if gap.isnan() else float(gap)


def bit_difference(result: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors that should have equal bits; 0.0 only if they do."""
    if torch.equal(result, expected):
        return 0.0
    gap = relative_distance(result.double(), expected.double())
    return gap or float("inf")


def tensor_deviation(
    result: Tensor,
    expected: Tensor,
    detail: str,
    *,
    limit: float = TOLERANCE,
    where: str | Callable[[], str] = "",
) -> Deviation:
    """Return the deviation of a tensor. With limit 0, bits are compared. `{}` in the detail is the size."""
    error = relative_distance(result, expected) if limit else bit_difference(result, expected)
    return Deviation(error, detail.format(f"{error:.1e}"), limit, where)


def in_words(error: Exception) -> str:
    """Describe an error on one line: the message of a tfkit error, or the first line of any other error."""
    if isinstance(error, SpecError):
        return "; ".join(diagnostic.message for diagnostic in error.diagnostics)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return (
        first if isinstance(error, AssertionError) and first else f"{type(error).__name__}: {first}".removesuffix(": ")
    )


Pair = tuple[Tensor, Tensor]
Align = Callable[[Tensor, Tensor], Pair | None]
"""Selects the parts of two outputs of a module that should be equal; None if they cannot be compared."""


# ---- two runs ----


def output_deviations(
    model: fx.GraphModule,
    inputs: Inputs,
    changed: Inputs,
    detail: str,
    align: Align = lambda a, b: (a, b),
    *,
    second: fx.GraphModule | None = None,
    limit: float = TOLERANCE,
    where: str = "",
) -> Iterator[Deviation]:
    """Compare the outputs of two runs in eval mode. With limit 0, bits are compared.

    Args:
        model: the model of the first run.
        inputs: inputs of the first run.
        changed: inputs of the second run.
        detail: the deviation as text; `{}` is the size of the difference.
        align: the parts of both outputs that should be equal.
        second: the model of the second run; None if it is the model of the first run.
        limit: the largest difference.
        where: the component that causes a difference; by default, the first component whose outputs differ.
    """
    runs = partial(eval_outputs, model, inputs), partial(eval_outputs, second or model, changed)
    search = partial(first_difference, model, *runs, align, second=second, limit=limit)
    for pair in map(align, runs[0](), runs[1]()):
        if pair is not None:
            yield tensor_deviation(pair[1], pair[0], detail, limit=limit, where=where or search)


def first_difference(
    model: fx.GraphModule,
    first_run: Callable[[], Any],
    second_run: Callable[[], Any],
    align: Align,
    *,
    second: fx.GraphModule | None = None,
    limit: float = TOLERANCE,
) -> str:
    """Return the path of the first component whose outputs differ by more than the limit; empty if none does."""
    ours, theirs = outputs_of(model, first_run), outputs_of(second or model, second_run)
    for path, output in ours.items():
        pair = align(output, theirs[path]) if path in theirs else None
        if pair is not None and pair[0].shape == pair[1].shape and not relative_distance(*pair) <= limit:
            return path
    return ""


def outputs_of(model: fx.GraphModule, run: Callable[[], Any], names: Iterable[str] | None = None) -> Outputs:
    """Return the outputs of the named modules, or of all components, in eval mode, innermost first."""
    with evaluation_mode(model), torch.no_grad():
        return module_outputs(model, model.meta["components"] if names is None else names, run, "the model")[0]


def position_slice(columns: slice) -> Align:
    """Select positions of [b, t, ...]."""
    return lambda a, b: (a[:, columns], b[:, columns]) if a.dim() > 2 and a.shape == b.shape else None

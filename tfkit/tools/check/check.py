"""Measuring all properties of a model, of a component, or of a subject of a plugin."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from tfkit.building.placement import thread_count
from tfkit.component import Component
from tfkit.errors import Diagnostic, SpecError, closest_name, listing, quoted
from tfkit.graph.expand import Graph
from tfkit.plugin.discover import normalized_name
from tfkit.plugin.manager import Plugins
from tfkit.plugin.missing import where_kind_is
from tfkit.spec.extending import plugin_folders
from tfkit.spec.messages import kind_of
from tfkit.tools.check.components import LAYOUTS, instead_of, models_of, options_of
from tfkit.tools.check.measure import EDITED, Level, Outcome, Property, Subject, outcome_of
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.properties.all import properties_of
from tfkit.tools.check.reduced import reduced_model

ORDER = ("failed", "ok", "not run", "does not apply")
"""Priority of the results of a property over several models, the most important first."""


@dataclass(frozen=True)
class Checked:
    """The outcomes of the properties of a model or of another subject.

    Attributes:
        name: the name of the spec.
        words: a summary of the reduced model or subject, such as `2 of 12 layers`; empty for the spec at full size.
        level: `quick` or `full`.
        seed: of all random numbers.
        outcomes: the result of each property, in the order of measurement.
        of: `model`, or the name of the type of subject.
        uncompared: the parts of the subject that were not compared with independent code, each with the reason.
    """

    name: str
    words: str
    level: str
    seed: int
    outcomes: tuple[Outcome, ...]
    of: str = "model"
    uncompared: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no property is broken."""
        return not self.failed

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The results of broken properties."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == "failed")

    @property
    def summary(self) -> str:
        """The number of results of each type: `23 ok, 1 failed, 2 do not apply`."""
        counts = Counter(outcome.status for outcome in self.outcomes)
        texts = [f"{counts['ok']} ok"]
        texts += [f"{counts[status]} {status}" for status in ("failed", "not run") if counts[status]]
        if idle := counts["does not apply"]:
            texts.append(f"{idle} {'does' if idle == 1 else 'do'} not apply")
        return ", ".join(texts)


def worst_of(models: Sequence[Checked]) -> tuple[Outcome, ...]:
    """Return the worst outcome of each property over several models."""
    by_name: dict[str, list[Outcome]] = {}
    for model in models:
        for outcome in model.outcomes:
            by_name.setdefault(outcome.name, []).append(outcome)
    return tuple(
        min(same, key=lambda outcome: (ORDER.index(outcome.status), -(outcome.worst or 0.0)))
        for same in by_name.values()
    )


AnySubject: TypeAlias = ModelUnderTest | Subject


class Work:
    """Selects the models, subjects and properties of a check, and measures them."""

    def __init__(self, plugins: Plugins, *, level: Level = "quick", only: Sequence[str] = (), seed: int = 0) -> None:
        self.plugins, self.level, self.seed = plugins, level, seed
        self.available = properties_of(plugins)
        self.faults = self.available.faults
        self.chosen = self.available.chosen(only, level)
        self._all = self.available.chosen(only)

    @property
    def types(self) -> tuple[str, ...]:
        """The names of the types of subjects."""
        return ("model", *self.available.types)

    def properties(self, subject: AnySubject) -> tuple[Property, ...]:
        """Return the properties to measure for a subject."""
        return tuple(prop for prop in self.chosen if prop.of == subject.of)

    def total(self, subjects: Sequence[tuple[AnySubject, str]]) -> int:
        """Return the total number of measurements; raise SpecError if there are none."""
        total = sum(len(self.properties(subject)) for subject, _ in subjects)
        if not total:
            name, of = self.chosen[0].name, self.chosen[0].of
            help = f"check a {of}: `tfkit check {'SPEC' if of == 'model' else of.upper()}`"
            raise SpecError(Diagnostic(f"`{name}` is a property of a {of}", help=help))
        return total

    def left(self, of: str) -> int:
        """Return the number of properties of a type of subject that the level excludes."""
        return sum(prop.of == of for prop in self._all) - sum(prop.of == of for prop in self.chosen)

    def of_model(self, graph: Graph, *, full_size: bool, weights: Path | None) -> list[tuple[AnySubject, str]]:
        """Return the model to check: the spec at full size with trained weights or on request, else a reduced model."""
        if full_size or weights is not None:
            return [(ModelUnderTest(replace(graph, weights=None), self.plugins, self.seed, weights), "")]
        reduced = reduced_model(graph, self.plugins)
        return [(ModelUnderTest(reduced.graph, self.plugins, self.seed), reduced.words)]

    def of_document(self, sort: str, spec: str, sets: Sequence[str]) -> Subject | None:
        """Read a document of a type and return its reduced subject; None if the type has no properties."""
        subject_type = self.available.types.get(sort)
        return None if subject_type is None else subject_type.read(spec, self.plugins, sets=sets, seed=self.seed)

    def components(self, kind: str | None, plugin: str | None) -> list[type[Component]]:
        """Return the components of a kind, in each slot that has it, or of a plugin."""
        return _of_kind(self.plugins, kind) if kind is not None else _of_plugin(self.plugins, str(plugin))

    def of_components(self, kind: str | None, plugin: str | None) -> list[tuple[AnySubject, str]]:
        """Return the models and other subjects around each component of a kind or of a plugin."""
        configs = self.components(kind, plugin)
        unsupported = [item for item in configs if item.slot not in self.available.slots]
        if unsupported:
            names = listing(f"{kind_of(item)} `{item.kind_name()}`" for item in unsupported)
            message = f"{names} cannot be checked alone"
            types = self.available.types.values()
            error = Diagnostic(message, help=instead_of(unsupported[0], self.plugins, types))
            if len(unsupported) == len(configs):
                raise SpecError(error)
            self.faults += (error,)
        return [item for config in configs if config not in unsupported for item in self._of_component(config)]

    def _of_component(self, config: type[Component]) -> list[tuple[AnySubject, str]]:
        """Return the models or other subjects around a component, for every pair of its options."""
        subjects: Mapping[str, AnySubject]
        subject_type = self.available.type_of(config.slot)
        if subject_type is not None:
            subjects = subject_type.around(config, self.plugins, options=options_of(config), seed=self.seed)
        else:
            within = LAYOUTS if config.slot != "init" else LAYOUTS[:1]
            subjects = models_of(config, self.plugins, options=options_of(config), within=within, seed=self.seed)
        name = f"{kind_of(config)} `{config.kind_name()}`"
        return [(subject, f"{name} in {words}") for words, subject in subjects.items()]

    def check(self, described: tuple[AnySubject, str], stage: Callable[[str], Any] = lambda name: None) -> Checked:
        """Measure every property of a subject."""
        subject, words = described
        with thread_count(1 if words else torch.get_num_threads()):  # several threads slow down a small model
            results = tuple(outcomes_of(subject, self.properties(subject), stage=stage))
        uncompared = tuple(self._uncompared(subject, {outcome.name: outcome for outcome in results}))
        return Checked(subject.name, words, self.level, self.seed, results, subject.of, uncompared)

    def _uncompared(self, subject: AnySubject, outcomes: Mapping[str, Outcome]) -> Iterator[str]:
        for prop in self._all:
            part = prop.compares(subject) if prop.of == subject.of else ""
            if part and prop.name not in outcomes:
                yield f"{part} was compared with nothing: --level full measures `{prop.name}`"
            elif part and outcomes[prop.name].status == "does not apply":
                yield f"{part} was compared with nothing: {outcomes[prop.name].detail}"


def _of_kind(plugins: Plugins, kind: str) -> list[Any]:
    """Return the components of a kind, in all slots that have the kind unless the name contains a slot."""
    slot, dot, name = kind.rpartition(".")
    slots = [slot] if dot else plugins.registry.slots()
    matches = [plugins.registry.find(item, name) for item in slots]
    configs = [item.config for item in matches if item is not None]
    if not configs:
        names = {name for item in plugins.registry.slots() for name in plugins.registry.kinds(item)}
        near = closest_name(name, sorted(names))
        similar = f"a kind with a similar name exists: `{near}`" if near else "list the kinds with `tfkit components`"
        help = where_kind_is(name, plugin_folders()) or similar
        raise SpecError(Diagnostic(f"there is no kind {quoted(kind)}", help=help))
    return configs


def _of_plugin(plugins: Plugins, name: str) -> list[Any]:
    """Return the components of a plugin."""
    for plugin in plugins.loaded:
        if normalized_name(plugin.name) == normalized_name(name):
            return [registered.config for registered in plugin.components]
    names = listing(plugin.name for plugin in plugins.loaded)
    raise SpecError(Diagnostic(f"there is no plugin {quoted(name)}", notes=(f"loaded: {names}",)))


def outcomes_of(
    subject: AnySubject,
    properties: Iterable[Property],
    *,
    stage: Callable[[str], Any] = lambda name: None,
    strict: bool = False,
) -> Iterator[Outcome]:
    """Yield the result of each property of the subject's type, in order.

    A property that follows from a broken property is not run. If a basic property is broken, no further property is.
    With `strict`, a property is broken if the code of a component does not support it.
    """
    broken: dict[str, Property] = {}
    causes: dict[str, str] = {}
    for prop in properties:
        if prop.of != subject.of:
            continue
        stage(prop.name)
        outcome = Outcome(prop.name, prop.claim, "not run")
        cause = _broken_cause(prop, broken, causes)
        if cause is not None:
            causes[prop.name] = cause
            yield replace(outcome, detail=f"follows from `{cause}`")
        elif prop.of_spec and isinstance(subject, ModelUnderTest) and subject.edits:
            yield replace(outcome, status="does not apply", detail=EDITED)
        elif not prop.of_weights and isinstance(subject, ModelUnderTest) and subject.has_weights:
            yield replace(outcome, status="does not apply", detail="the weights are trained")
        else:
            start = time.perf_counter()
            measured = outcome_of(prop, subject, strict=strict)
            if measured.status == "failed":
                broken[prop.name] = prop
            yield replace(measured, seconds=time.perf_counter() - start)


def _broken_cause(prop: Property, broken: Mapping[str, Property], causes: Mapping[str, str]) -> str | None:
    """Return the broken property that makes this property meaningless, directly or through other properties."""
    for name, other in broken.items():
        if other.basic or name in prop.follows:
            return name
    return next((causes[name] for name in prop.follows if name in causes), None)

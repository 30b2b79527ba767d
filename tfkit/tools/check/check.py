"""The check of a model: every property in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tfkit.component import Component
from tfkit.errors import Diagnostic, SpecError, closest, listing, quoted
from tfkit.graph.expand import Graph
from tfkit.placement import threads
from tfkit.plugin.discover import canonical
from tfkit.plugin.manager import Plugins
from tfkit.spec.messages import kind_of
from tfkit.tools.check.components import instead_of, models_of, options_of
from tfkit.tools.check.known import properties_of
from tfkit.tools.check.measure import Level, Outcome, Property, outcome_of
from tfkit.tools.check.relative import relative
from tfkit.tools.check.result import Checked
from tfkit.tools.check.small import LAYOUTS, SLOTS
from tfkit.tools.check.subject import Subject


class Work:
    """The check of some models: the properties, and how many of them there are to measure."""

    def __init__(self, plugins: Plugins, *, level: Level = "quick", only: Sequence[str] = (), seed: int = 0) -> None:
        self.plugins, self.level, self.seed = plugins, level, seed
        known = properties_of(plugins)
        self.faults = known.faults
        self.properties = known.chosen(only, level)
        self.left = len(known.chosen(only)) - len(self.properties)
        self.total = len(self.properties)

    def of_model(self, graph: Graph, *, whole: bool, weights: Path | None) -> list[tuple[Subject, str]]:
        """The model to check: the spec itself with trained weights or if asked for, else its smallest relative."""
        if whole or weights is not None:
            return [(Subject(replace(graph, weights=None), self.plugins, self.seed, weights), "")]
        small = relative(graph, self.plugins)
        return [(Subject(small.graph, self.plugins, self.seed), small.words)]

    def of_components(self, kind: str | None, plugin: str | None) -> list[tuple[Subject, str]]:
        """The models around each component of that kind, or of that plugin."""
        configs = _of_kind(self.plugins, kind) if kind is not None else _of_plugin(self.plugins, str(plugin))
        others = [one for one in configs if one.slot not in SLOTS]
        if others:
            names = listing(f"{kind_of(one)} `{one.kind_name()}`" for one in others)
            message = f"{names} {'has' if len(others) == 1 else 'have'} no small model"
            wrong = Diagnostic(message, help=instead_of(others[0], self.plugins))
            if len(others) == len(configs):
                raise SpecError(wrong)
            self.faults += (wrong,)
        models = [one for config in configs if config.slot in SLOTS for one in self._of_component(config)]
        self.total *= len(models)
        return models

    def _of_component(self, config: type[Component]) -> list[tuple[Subject, str]]:
        """The models around a component, for every pair of its options."""
        within = LAYOUTS if config.slot != "init" else LAYOUTS[:1]
        found = models_of(config, self.plugins, options=options_of(config), within=within, seed=self.seed)
        name = f"{kind_of(config)} `{config.kind_name()}`"
        return [(subject, f"{name} in {words}") for words, subject in found.items()]

    def check(self, model: tuple[Subject, str], stage: Callable[[str], Any] = lambda name: None) -> Checked:
        """Measure every property of a model."""
        subject, words = model
        with threads(1 if words else torch.get_num_threads()):  # more of them slow a small model down
            found = tuple(outcomes(subject, self.properties, stage=stage))
        return Checked(subject.graph.name, words, self.level, self.seed, found)


def _of_kind(plugins: Plugins, kind: str) -> list[Any]:
    """The components of a kind; of all slots that have one unless the name says which."""
    slot, dot, name = kind.rpartition(".")
    slots = [slot] if dot else plugins.registry.slots()
    found = [plugins.registry.find(one, name) for one in slots]
    configs = [one.config for one in found if one is not None]
    if not configs:
        known = {name for one in plugins.registry.slots() for name in plugins.registry.kinds(one)}
        near = closest(name, sorted(known))
        help = f"a kind with a similar name exists: `{near}`" if near else "`tfkit components` lists them"
        raise SpecError(Diagnostic(f"there is no kind {quoted(kind)}", help=help))
    return configs


def _of_plugin(plugins: Plugins, name: str) -> list[Any]:
    """The components of a plugin."""
    for plugin in plugins.loaded:
        if canonical(plugin.name) == canonical(name):
            return [one.config for one in plugin.components]
    known = listing(plugin.name for plugin in plugins.loaded)
    raise SpecError(Diagnostic(f"there is no plugin {quoted(name)}", notes=(f"loaded: {known}",)))


def outcomes(
    subject: Subject,
    properties: Iterable[Property],
    *,
    stage: Callable[[str], Any] = lambda name: None,
) -> Iterator[Outcome]:
    """The result of each property, in order.

    What follows from a broken property is not run, and all others are not if a basic one is broken.
    """
    broken: dict[str, Property] = {}
    causes: dict[str, str] = {}
    for one in properties:
        stage(one.name)
        outcome = Outcome(one.name, one.claim, "not run")
        cause = _cause(one, broken, causes)
        if cause is not None:
            causes[one.name] = cause
            yield replace(outcome, detail=f"follows from `{cause}`")
        elif subject.weights is not None and not one.of_weights:
            yield replace(outcome, status="does not apply", detail="the weights are trained")
        else:
            start = time.perf_counter()
            found = outcome_of(one, subject)
            if found.status == "failed":
                broken[one.name] = one
            yield replace(found, seconds=time.perf_counter() - start)


def _cause(one: Property, broken: Mapping[str, Property], causes: Mapping[str, str]) -> str | None:
    """The broken property that makes this one meaningless, directly or by way of others."""
    for name, other in broken.items():
        if other.basic or name in one.follows:
            return name
    return next((causes[name] for name in one.follows if name in causes), None)

"""Warnings about a model by the checks of plugins: their hook `tfkit_checks`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tfkit.errors import Diagnostic
from tfkit.graph.expand import Graph
from tfkit.plugin.manager import Plugins


def warnings_of(graph: Graph, plugins: Plugins) -> list[Diagnostic]:
    """The warnings of all plugins, each with its place and the plugin's label; a check that fails is one itself."""
    answers = plugins.hooks.call("tfkit_checks", _diagnostics, graph=graph)
    found = [_placed(one, graph, plugin) for plugin, given in answers.given for one in given]
    return [*found, *answers.faults]


def _placed(found: Diagnostic, graph: Graph, plugin: str) -> Diagnostic:
    span = found.span or (graph.spec.provenance.span(tuple(found.path.split("."))) if found.path else None)
    return replace(found, span=span, notes=(*found.notes, f"from the plugin {plugin}"))


def _diagnostics(returned: object) -> list[Diagnostic]:
    """The reader of the hook."""
    found = returned if isinstance(returned, Iterable) else [returned]
    return [_diagnostic(one) for one in found]


def _diagnostic(one: object) -> Diagnostic:
    if not isinstance(one, Diagnostic):
        raise TypeError(f"returned {type(one).__name__}, not a list of tfkit.Diagnostic")
    return one

"""Warnings about a model from the hook `tfkit_checks` of plugins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tfkit.errors import Diagnostic
from tfkit.graph.expand import Graph, located_diagnostic
from tfkit.plugin.manager import Plugins


def warnings_of(graph: Graph, plugins: Plugins) -> list[Diagnostic]:
    """Return the warnings of all plugins, each with its location and the label of its plugin.

    A check that fails is itself reported as a warning.
    """
    answers = plugins.hooks.call("tfkit_checks", _diagnostic_list, graph=graph)
    diagnostics = [
        replace(located_diagnostic(diagnostic, graph), notes=(*diagnostic.notes, f"from the plugin {plugin}"))
        for plugin, results in answers.values
        for diagnostic in results
    ]
    return [*diagnostics, *answers.faults]


def _diagnostic_list(returned: object) -> list[Diagnostic]:
    """Convert the result of a hook to a list of diagnostics."""
    items = returned if isinstance(returned, Iterable) else [returned]
    return [_checked_diagnostic(item) for item in items]


def _checked_diagnostic(item: object) -> Diagnostic:
    if not isinstance(item, Diagnostic):
        raise TypeError(f"must return a list of tfkit.Diagnostic; got {type(item).__name__}")
    return item

"""Every check on a model, and all their findings, by the names of the promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tfkit.builder import build, inputs_of
from tfkit.component import Component
from tfkit.graph.decode_split import split_if_decodable
from tfkit.graph.expand import Graph
from tfkit.graph.sequence_limits import max_len
from tfkit.testing import checks, parts
from tfkit.testing.cached import check_cached, check_cached_step
from tfkit.testing.inputs import Inputs, example_inputs
from tfkit.tools.build.first_run import run_watched

CACHED = 12
"""Tokens of the sequences that are read in steps."""


def broken_promises(
    graph: Graph, *, causal: str | None = None, component: type[Component] | None = None
) -> dict[str, str]:
    """The faults of a graph's model, by the promise that is broken.

    Consequences of another broken promise are left out: if a forward fails, or weights are not filled, its results mean
    nothing.

    Args:
        graph: the model.
        causal: the input along which it must not look ahead.
        component: the component all of whose fields must have an effect.
    """
    report = _Report()
    filled = report.holds("weights", checks.check_filled, graph)
    models: list[fx.GraphModule] = []
    if not report.holds("building", lambda: models.append(build(graph))):
        return report.broken
    (model,) = models
    inputs, padded = example_inputs(graph), example_inputs(graph, padding="rows")
    if not report.holds("forward", _runs, model, inputs):
        return report.broken
    if component is not None:
        report.holds("fields", parts.check_fields, graph, component)
    if not filled:  # computed with whatever was in memory
        return report.broken
    report.holds("types", checks.check_dtype, graph, torch.bfloat16)
    if report.holds("gradients", checks.check_gradients, model, inputs):
        report.holds("gradients beside a row of padding", checks.check_gradients, model, padded)
    if report.holds("eval mode", parts.check_repeatable, model, inputs):
        _compare(report, graph, model, inputs, causal)
    return report.broken


def _compare(report: _Report, graph: Graph, model: fx.GraphModule, inputs: Inputs, causal: str | None) -> None:
    """The promises that two runs give the same."""
    report.holds("state dict", checks.check_state_dict, graph)
    calls = [example_inputs(graph, length=n, padding="left") for n in (5, 8)]
    report.holds("TorchScript", checks.check_script, model, inputs, *calls)
    report.holds("torch.compile", checks.check_capture, model, *calls)
    alone = report.holds("each position by itself", parts.check_alone, model, inputs)
    if not alone or (
        causal is not None and not report.holds("no look-ahead", checks.check_causal, model, inputs, along=causal)
    ):
        return
    padding = report.holds("padding", checks.check_padding, model, inputs)
    if padding and split_if_decodable(graph) is not None:
        inputs = example_inputs(graph, length=min(CACHED, max_len(graph) or CACHED))
        if report.holds("decoding in steps", check_cached, model, inputs):
            report.holds("the compiled step of decoding", check_cached_step, model, inputs)


def _runs(model: fx.GraphModule, inputs: Inputs) -> None:
    run_watched(model, {name: value for name, value in inputs.items() if name in inputs_of(model)})


class _Report:
    """The findings of the checks that ran."""

    def __init__(self) -> None:
        self.broken: dict[str, str] = {}

    def holds(self, promise: str, check: Callable[..., Any], *args: Any, **given: Any) -> bool:
        """Run a check, and note its findings."""
        try:
            check(*args, **given)
        except Exception as wrong:
            self.broken[promise] = checks.in_words(wrong)
        return promise not in self.broken


def in_lines(name: str, found: Mapping[str, Mapping[str, str]]) -> str:
    """The faults of several models, as an error lists them: each finding once, with its models.

    Args:
        name: the component or model that breaks the promises.
        found: the broken promises by model; a model without a name is not mentioned.
    """
    where: dict[tuple[str, str], list[str]] = {}
    for model, broken in found.items():
        for promise, wrong in broken.items():
            where.setdefault((promise, wrong), []).append(model)
    lines = [
        f"- {promise}{f', in {_listed(models)}' if any(models) else ''}: {wrong}"
        for (promise, wrong), models in where.items()
    ]
    count = len({promise for promise, _ in where})
    return "\n".join([f"{name} breaks {'a promise' if count == 1 else f'{count} promises'}", *lines])


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

"""The size and the length of a run, where its sweep computes them."""

from __future__ import annotations

import math
from dataclasses import replace

from tfkit.component import Data
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import expand
from tfkit.plugin.manager import Plugins
from tfkit.spec.arithmetic import ExpressionError, Number, evaluate
from tfkit.spec.merge import change_of
from tfkit.spec.messages import expression_span, unknown_name
from tfkit.spec.read_run import RunFile, RunText, model_of, of_model, resolve_run
from tfkit.spec.read_sweep import SweepFile
from tfkit.spec.run import MODEL
from tfkit.spec.tree import Scalar
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.solve.budget import Budget, parameters_of
from tfkit.tools.solve.family import Family
from tfkit.tools.solve.solve import sizes_of

NAMES = ("params", "flops")


def resized(text: RunText, params: int, file: SweepFile, plugins: Plugins, known: dict[str, Data]) -> RunText:
    """The run with the size of its model's family that is nearest to a number of parameters."""
    data = resolve_run(text, plugins, known=known).data
    try:
        with of_model():
            family = Family(model_of(text, data), text.file, plugins)
            changes = sizes_of(family, Budget("params", params)).sizes[0].sets
    except SpecError as wrong:
        span = file.provenance.span(("sizes", "params"))
        raise SpecError(*(replace(one, span=one.span or span, path="sizes.params") for one in wrong.diagnostics))  # noqa: B904
    for change in changes:
        text = text.assigned(change_of(f"{MODEL}.{change}"), plugins)
    return text


def lengthened(text: RunText, file: SweepFile, plugins: Plugins, known: dict[str, Data]) -> RunText:
    """The run with as many tokens as the sweep gives it; as it is if the sweep does not say."""
    if file.tokens is None:
        return text
    run = resolve_run(text, plugins, known=known)
    tokens = _value(file, file.tokens, run)
    return text.of_length(Scalar(tokens, file.tokens.span), of="tokens")


def _value(file: SweepFile, node: Scalar, run: RunFile) -> int:
    """The tokens of a run; raises SpecError with the place of what is wrong."""
    span, help = node.span, "`params` are those of the model, `flops` those of one token, forward and backward"
    try:
        found = evaluate(str(node.value), lambda name: _size(name, run))
    except ExpressionError as wrong:
        span = expression_span(span, str(node.value), wrong.columns)
        raise SpecError(Diagnostic(f"`tokens`: {wrong}", span, "tokens", wrong.notes, wrong.help or help)) from None
    if found < 1:
        raise SpecError(Diagnostic(f"`tokens`: {found:g} are not enough for a step", span, "tokens", help=help))
    return math.ceil(found)


def _size(name: str, run: RunFile) -> Number:
    """The number that a name stands for."""
    if name not in NAMES:
        raise unknown_name(name, NAMES)
    with of_model():
        graph = expand(run.model)
    if name == "params":
        return parameters_of(graph)[0]
    length = run.data.length
    return flops_of_step(graph, 1, length) / length

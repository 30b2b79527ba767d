"""Comparison of a file with its model: equal weights, and equal outputs at shapes that differ from the export."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.building.builder import graph_of
from tfkit.decoding.cached import CachedModel
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.graph.decode_split import split_if_decodable
from tfkit.tools.common.model_inputs import Sequences, as_tensors, cached_cases, full_sequence_cases
from tfkit.tools.common.ownership import owners_of
from tfkit.tools.export.formats import ComponentCall, Format, Inputs, Opened
from tfkit.torch_private.tensors import map_nested

TOLERANCES = {torch.bfloat16: 5e-2, torch.float16: 5e-3}
"""Tolerances of half-precision dtypes: reordered operations round differently."""


HELP = "nothing was written; another --format may work"


@dataclass(frozen=True)
class Check:
    """One comparison of a file with its model.

    Attributes:
        case: the inputs, described by batch x length and padding.
        difference: the largest difference of the outputs, relative to the largest value if it is above 1.
    """

    case: str
    difference: float


@torch.no_grad()
def check(model: fx.GraphModule, opened: Opened, format: Format) -> tuple[Check, ...]:
    """Compare a file with the model that it was written from.

    Raises:
        SpecError: they differ; the message names the first component that does.
    """
    tolerance = TOLERANCES.get(next(model.parameters()).dtype, format.tolerance)
    _check_weights(model, opened, format)
    checks = []
    for case in full_sequence_cases(model):
        difference = _output_difference(
            model, case.inputs, opened.forward(case.inputs), as_tensors(model(**case.inputs))
        )
        checks.append(Check(case.words, difference))
        if not difference <= tolerance:
            calls, want = _recorded_calls(model, lambda inputs=case.inputs: model(**inputs))  # type: ignore[misc]
            first = _first_differing_module(opened.outputs(case.inputs, calls), want, tolerance)
            raise _difference_error(model, format, first, _difference_text(checks[-1], tolerance))
    checks += [
        _check_cached(model, opened, format, sequences, tolerance) for sequences in _cached_sequences(model, opened)
    ]
    return tuple(checks)


def _check_weights(model: fx.GraphModule, opened: Opened, format: Format) -> None:
    """Raise SpecError unless the weights in the file are bit-identical to the weights of the model."""
    ours = model.state_dict()
    for name, tensor in opened.weights().items():
        if name in ours and not torch.equal(tensor, ours[name]):
            raise _difference_error(model, format, name.rpartition(".")[0], f"its weight `{name}` differs in the file")


def _cached_sequences(model: fx.GraphModule, opened: Opened) -> Iterator[Sequences]:
    parts = split_if_decodable(graph_of(model))
    if parts is not None and opened.cached(1) is not None:
        yield from cached_cases(model, parts)


def _check_cached(
    model: fx.GraphModule, opened: Opened, format: Format, sequences: Sequences, tolerance: float
) -> Check:
    reader, cached = opened.cached(sequences.length), CachedModel(model, length=sequences.length)
    assert reader is not None
    batch = next(iter(sequences.steps[0].values())).size(0)
    largest, main = 0.0, next(iter(sequences.steps[0]))
    reader.start(batch, **sequences.once)
    cached.start(batch, **sequences.once)
    for number, piece in enumerate(sequences.steps):
        rest: dict[str, Any] = dict(piece)
        tokens, mask = rest.pop(main), rest.pop(f"{main}_mask", None)
        results, expected = as_tensors(reader(tokens, mask, **rest)), as_tensors(cached(tokens, mask, **rest))
        difference = _output_difference(model, piece, results, expected)
        if not difference <= tolerance:
            first = _first_cached(model, opened, sequences, number, tolerance)
            raise _difference_error(
                model, format, first, _difference_text(Check(sequences.words, difference), tolerance)
            )
        largest = max(largest, difference)
    return Check(sequences.words, largest)


def _first_cached(
    model: fx.GraphModule, opened: Opened, sequences: Sequences, number: int, tolerance: float
) -> str | None:
    """Return the first component that differs in a step, or in a full forward over the same tokens."""
    cached, main = CachedModel(model, length=sequences.length), next(iter(sequences.steps[0]))
    cached.start(sequences.steps[0][main].size(0), **sequences.once)

    def read(piece: Inputs) -> None:
        rest: dict[str, Any] = dict(piece)
        cached(rest.pop(main), rest.pop(f"{main}_mask", None), **rest)

    for piece in sequences.steps[:number]:
        read(piece)
    calls, want = _recorded_calls(model, lambda: read(sequences.steps[number]))
    return _first_differing_module(opened.outputs({**sequences.once, **sequences.steps[0]}, calls), want, tolerance)


def _recorded_calls(
    model: fx.GraphModule, run: Callable[[], Any]
) -> tuple[dict[str, ComponentCall], dict[str, Tensor]]:
    """Record the arguments and the result of the first call of each module, in the order in which they return."""
    arguments: dict[str, ComponentCall] = {}
    returned: dict[str, Tensor] = {}

    def before(path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if path not in arguments:  # a cache is updated in place after it is read
            copied = map_nested(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
            arguments[path] = ComponentCall(*copied)

    def after(path: str, _: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            returned.setdefault(path, output.clone())

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if path:
                hooks.enter_context(module.register_forward_pre_hook(partial(before, path), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(partial(after, path)))
        run()
    return {path: arguments[path] for path in returned}, returned


def _first_differing_module(
    outputs: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> str | None:
    """Return the first module whose output differs in the file."""
    for path, output in expected.items():
        if (
            path in outputs
            and outputs[path].shape == output.shape
            and not _relative_difference(outputs[path], output) <= tolerance
        ):
            return path
    return None


def _output_difference(model: fx.GraphModule, inputs: Inputs, results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of outputs, outside padding."""
    graph, largest = graph_of(model), 0.0
    for name, result, reference in zip(graph.outputs, results, expected, strict=True):
        mask = inputs.get(str(graph.node(name).output.mask))
        if result.shape != reference.shape:
            return math.inf
        tokens = mask if mask is not None and mask.shape == reference.shape[:2] else ...
        largest = max(largest, _relative_difference(result[tokens], reference[tokens]))
    return largest


def _relative_difference(result: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value if it is above 1; infinite for NaN on one side."""
    if not expected.numel():
        return 0.0
    same = (result == expected) | (result.isnan() & expected.isnan())
    gap = (result.double() - expected.double()).abs().masked_fill(same, 0.0).nan_to_num(math.inf, math.inf)
    return float(gap.max() / expected.double().abs().nan_to_num(1.0, 1.0).max().clamp(min=1))


def _difference_text(check: Check, tolerance: float) -> str:
    return f"{check.case}: the outputs differ by {check.difference:.1e}; {tolerance:.0e} is allowed"


def _difference_error(model: fx.GraphModule, format: Format, path: str | None, how: str) -> SpecError:
    """Return the error for a file that differs from its model."""
    what = f"the {format.name} file differs from {quoted(graph_of(model).name)}"
    parts = owners_of(model)
    if path is None:
        return SpecError(Diagnostic(f"{what}, but no single component is at fault", None, "", (how,), HELP))
    label = f"{parts[path].label} " if path in parts else ""
    return SpecError(Diagnostic(f"{what}: the first component that differs is {label}`{path}`", None, "", (how,), HELP))

"""Compares a built model in float64 with `tfkit.reference`, with random weights, and names the first difference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import tfkit
from tfkit.building.builder import inputs_of
from tfkit.reference import Kinds, run

TOLERANCE = 1e-10
"""Relative to the largest value if that is above 1."""
Array = NDArray[Any]
Calls = dict[str, list[Array]]


def check_agreement(graph: tfkit.Graph, *calls: Mapping[str, Tensor], kinds: Kinds | None = None) -> None:
    """Assert that a model and the reference give the same for each call, wherever there is no padding."""
    model = tfkit.build(graph).double().eval()
    fill(model)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    fused = {path: parts for path, layer in model.named_modules() if (parts := getattr(layer, "parts", None))}
    for call in calls:
        inputs = {name: call[name] for name in inputs_of(model) if name in call}
        inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        with tables_in_float64():
            outputs, records = observe(model, inputs)
        arrays = {name: x.numpy() for name, x in inputs.items()}
        expected = run(graph, weights, arrays, kinds=kinds, fused=fused)
        for actual, (name, want) in zip(outputs, expected.outputs.items(), strict=True):
            error = difference(actual, want, expected.real[name])
            if error > TOLERANCE:
                where = first_difference(records, expected.trace, {mask.shape: mask for mask in expected.real.values()})
                raise AssertionError(f"{name} differs by {error:.1e}, first at {where}")


def fill(model: nn.Module) -> None:
    """Fill every weight at random, those of norms and biases too; none stays near its initial value."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        mean, deviation = (0.0, weight.shape[1] ** -0.5) if weight.ndim > 1 else (0.4, 0.5)
        weight.data.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * deviation + mean)


@contextmanager
def tables_in_float64() -> Iterator[None]:
    """Cosines, sines and slopes are float32 in a model of any type: here they are float64."""
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(Tensor, "float", Tensor.double):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def observe(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[list[Array], Calls]:
    """The outputs of a model, and those of each of its modules in the order of their calls."""
    calls: Calls = defaultdict(list)

    def note(name: str, y: object) -> None:
        if isinstance(y, Tensor):
            calls[name].append(y.numpy())

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, y, name=name: note(name, y))
        for name, module in model.named_modules()
        if name
    ]
    with torch.no_grad():
        actual = model(**inputs)
    for hook in hooks:
        hook.remove()
    return [y.numpy() for y in ([actual] if isinstance(actual, Tensor) else actual)], calls


def difference(actual: Array, want: Array, real: Array) -> float:
    """The largest one outside of padding, relative to the largest value if that is above 1."""
    if actual.shape != want.shape:
        return np.inf
    actual, want = actual[real], want[real]
    error = np.abs(actual - want).max(initial=0) / max(1.0, np.abs(want).max(initial=0))
    return float(np.nan_to_num(error, nan=np.inf))


def first_difference(
    records: Calls, trace: list[tuple[str, Array]], real: Mapping[tuple[int, ...], Array]
) -> str | None:
    """The path of the first component whose output differs from that of the module of its name."""
    calls: dict[str, int] = defaultdict(int)
    for path, want in trace:
        actual = records.get(path, [])[calls[path] : calls[path] + 1]
        calls[path] += 1
        tokens = real.get(want.shape[:2], np.ones(want.shape[:1], bool))
        if actual and actual[0].shape == want.shape and difference(actual[0], want, tokens) > TOLERANCE:
            return path
    return None

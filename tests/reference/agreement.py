"""A built model in float64 beside `tfkit.reference`, with random weights, and the first component that differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import tfkit
from tfkit.builder import inputs_of
from tfkit.reference import Kinds, run

TOLERANCE = 1e-10
"""Of float64, relative to the largest value if that is above 1."""
Array = NDArray[np.float64]


def check_agreement(
    graph: tfkit.Graph, *calls: Mapping[str, Tensor], kinds: Kinds | None = None, backend: str = "sdpa"
) -> None:
    """Assert that model and reference give the same for each call, wherever there is no padding."""
    model = tfkit.build(graph, attention_backend=backend).double().eval()
    fill(model)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for inputs in calls:
        taken = inputs_of(model)
        inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items() if name in taken}
        outputs, seen = observe(model, inputs)
        wanted = run(graph, weights, {name: x.numpy() for name, x in inputs.items()}, kinds=kinds)
        for found, (name, want) in zip(outputs, wanted.outputs.items(), strict=True):
            error = difference(found, want, wanted.real.get(name))
            where = first_difference(seen, wanted.trace, {r.shape[1]: r for r in wanted.real.values() if r.ndim == 2})
            assert error < TOLERANCE, f"{name} differs by {error:.1e}, first at {where}"


def fill(model: nn.Module) -> None:
    """Random weights and biases, of norms too, and none that is near its initial value."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        mean, deviation = (0.0, weight.shape[1] ** -0.5) if weight.ndim > 1 else (0.4, 0.5)
        weight.data.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * deviation + mean)


def observe(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[list[Array], dict[str, list[Array]]]:
    """The outputs of a model, and those of each of its modules in the order of their calls."""
    seen: dict[str, list[Array]] = defaultdict(list)

    def look(name: str) -> None:
        module = model.get_submodule(name)
        module.register_forward_hook(
            lambda _, __, y: seen[name].append(y.detach().numpy()) if isinstance(y, Tensor) else None
        )

    for name, _ in list(model.named_modules())[1:]:
        look(name)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), patch.object(Tensor, "float", Tensor.double):  # tables of positions are float32 otherwise
            found = model(**inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    return [y.numpy() for y in ([found] if isinstance(found, Tensor) else found)], seen


def difference(found: Array, want: Array, real: NDArray[np.bool_] | None) -> float:
    """The largest one outside of padding, relative to the largest value if that is above 1."""
    if found.shape != want.shape or not np.isfinite(want).all():
        return np.inf
    if real is not None:
        found, want = found[real], want[real]
    error = np.abs(found - want).max(initial=0) / max(1.0, np.abs(want).max(initial=0))
    return float(np.nan_to_num(error, nan=np.inf))


def first_difference(
    seen: Mapping[str, list[Array]], trace: tuple[tuple[str, Array], ...], real: Mapping
) -> str | None:
    """The path of the first component whose output differs from that of the module of this name."""
    calls: dict[str, int] = defaultdict(int)
    for path, want in trace:
        found = seen.get(path, [])[calls[path] : calls[path] + 1]
        calls[path] += 1
        if found and found[0].shape == want.shape:
            if difference(found[0], want, real.get(want.shape[1]) if want.ndim == 3 else None) > TOLERANCE:
                return path
    return None

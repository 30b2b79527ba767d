"""The meaning of a spec: what it says it computes, by an interpreter that shares nothing with the model."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tfkit.building.builder import inputs_of
from tfkit.component import RopeScalingConfig
from tfkit.reference import Result, UnknownKind, run
from tfkit.tools.check.inputs import Inputs, call, cast
from tfkit.tools.check.measure import TOLERANCE, DoesNotApplyError, Measured, distance, property_of
from tfkit.tools.check.places import outputs_of
from tfkit.tools.check.subject import Subject

Array = NDArray[np.float64]


@property_of("meaning", "computes what its spec says", follows=("alone",))
def meaning(subject: Subject) -> Iterator[Measured]:
    """In float64, the outputs equal the outputs of `tfkit.reference`, also next to padding on both sides.

    Where rotary positions are scaled, a sequence without padding is longer than the others.
    """
    model = copy.deepcopy(subject.model).double()
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    scaled = any(True for _ in subject.graph.configs(RopeScalingConfig))  # type: ignore[type-abstract]
    for padding in ("none", "left", "right") if subject.padded else ("none",):
        values = subject.inputs(padding=padding, length=subject.longest if scaled and padding == "none" else None)
        inputs = {name: x for name, x in cast(values, torch.float64).items() if name in inputs_of(model)}
        try:
            expected = run(subject.graph, weights, {name: x.numpy() for name, x in inputs.items()}, kinds=subject.kinds)
        except UnknownKind as unknown:
            raise DoesNotApplyError(f"the reference has no {unknown.slot} `{unknown.kind}`") from None
        for output, (name, want) in zip(subject.run(inputs, model), expected.outputs.items(), strict=True):
            error = _difference(output, want, expected.real[name])
            detail = f"`{name}` differs from what the spec says by {error:.1e}"
            yield Measured(error, detail, where=partial(_where, model, inputs, expected))


def _difference(output: Tensor, expected: Array, real: Array) -> float:
    """Return the distance outside of padding."""
    tokens = torch.from_numpy(real)
    return distance(output[tokens], torch.from_numpy(expected)[tokens]) if output.shape == expected.shape else math.inf


def _where(model: torch.fx.GraphModule, inputs: Inputs, expected: Result) -> str:
    """Return the first component whose output differs; of a component that runs several times, the first run."""
    seen, runs = outputs_of(model, partial(call, model, inputs)), defaultdict[str, int](int)
    tokens = {real.shape: real for real in expected.real.values()}
    for path, reference in expected.trace:
        runs[path] += 1
        if path in seen and runs[path] == 1:
            real = tokens.get(reference.shape[:2], np.ones(reference.shape[:1], bool))
            if seen[path].shape == reference.shape and _difference(seen[path], reference, real) > TOLERANCE:
                return path
    return ""

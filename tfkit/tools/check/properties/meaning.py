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

from tfkit.builder import inputs_of
from tfkit.component import RopeScalingConfig
from tfkit.reference import Result, UnknownKind, run
from tfkit.tools.check.inputs import Inputs, call, cast
from tfkit.tools.check.measure import TOLERANCE, DoesNotApplyError, Measured, distance, property_of
from tfkit.tools.check.places import outputs_of
from tfkit.tools.check.subject import Subject

Array = NDArray[np.float64]


@property_of("meaning", "computes what its spec says", follows=("alone",))
def meaning(subject: Subject) -> Iterator[Measured]:
    """In float64, the outputs are those of `tfkit.reference`, beside padding on both sides too.

    Where rotary positions are scaled, a sequence without padding is longer than the others.
    """
    model = copy.deepcopy(subject.model).double()
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    scaled = any(True for _ in subject.graph.configs(RopeScalingConfig))  # type: ignore[type-abstract]
    for padding in ("none", "left", "right") if subject.padded else ("none",):
        given = subject.inputs(padding=padding, length=subject.longest if scaled and padding == "none" else None)
        inputs = {name: x for name, x in cast(given, torch.float64).items() if name in inputs_of(model)}
        try:
            wanted = run(subject.graph, weights, {name: x.numpy() for name, x in inputs.items()}, kinds=subject.kinds)
        except UnknownKind as wrong:
            raise DoesNotApplyError(f"the reference has no {wrong.slot} `{wrong.kind}`") from None
        for found, (name, want) in zip(subject.run(inputs, model), wanted.outputs.items(), strict=True):
            error = _difference(found, want, wanted.real[name])
            detail = f"`{name}` differs from what the spec says by {error:.1e}"
            yield Measured(error, detail, where=partial(_where, model, inputs, wanted))


def _difference(found: Tensor, want: Array, real: Array) -> float:
    """The distance outside of padding."""
    tokens = torch.from_numpy(real)
    return distance(found[tokens], torch.from_numpy(want)[tokens]) if found.shape == want.shape else math.inf


def _where(model: torch.fx.GraphModule, inputs: Inputs, wanted: Result) -> str:
    """The first component whose output differs, of several runs in the first."""
    seen, runs = outputs_of(model, partial(call, model, inputs)), defaultdict[str, int](int)
    tokens = {real.shape: real for real in wanted.real.values()}
    for path, want in wanted.trace:
        runs[path] += 1
        if path in seen and runs[path] == 1:
            real = tokens.get(want.shape[:2], np.ones(want.shape[:1], bool))
            if seen[path].shape == want.shape and _difference(seen[path], want, real) > TOLERANCE:
                return path
    return ""

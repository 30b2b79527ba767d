"""Two models on the same tokens: how much they differ, and the first component at which they diverge."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tfkit.arguments import AnyPath, Limit, Positive, Seed, checked
from tfkit.graph.expand import AnySpec, Graph, as_graph
from tfkit.placement import AnyDevice, AnyDtype, device_of, dtype_of
from tfkit.spec.extending import SUFFIXES
from tfkit.spec.folder import SPEC
from tfkit.tools.common.weights import build_with_weights
from tfkit.tools.compare.common_inputs import common_inputs
from tfkit.tools.compare.other_model import other_model
from tfkit.tools.compare.outputs import Outputs, depends, outputs

RETURNED = "(output of the model)"
FADED = 1e-4
"""Maximum fraction of a difference that may remain in equal outputs computed from it; real differences fade less."""
Tolerance: TypeAlias = Annotated[float, Limit(least=0)]


@dataclass(frozen=True)
class Compared:
    """A component of A and the corresponding one of B.

    Attributes:
        name: its path in A.
        other: its path in B.
        difference: the largest difference between their outputs.
        size: the largest value of B's output, at least 1: differences are relative to it.
        place: the index of the largest difference.
        values: the values of A and B at that index.
        reference: the largest difference of A's output from its output in float64, if requested.
    """

    name: str
    other: str
    difference: float
    size: float
    place: tuple[int, ...]
    values: tuple[float, float]
    reference: float | None

    @property
    def relative(self) -> float:
        """The difference relative to the size."""
        return self.difference / self.size


@dataclass(frozen=True)
class Unlike:
    """A component of both models that cannot be compared: its paths, and the reason."""

    name: str
    other: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """The results of two models for the same tokens.

    Attributes:
        difference: the largest difference between their outputs; None if they cannot be compared.
        parts: the components that both have, in the order in which A runs them; the models' outputs come last.
        first: the first component that differs by more than the tolerance, relative to its size.
        forms: differing components before `first` that are equal in another form: the outputs computed from them
            agree, as if B's attention adds the residual; or an output is the other times a number.
        unlike: the components that both have but that cannot be compared.
        alone: the components that only A has, and the components that only B has, if B is a spec.
    """

    difference: float | None
    parts: tuple[Compared, ...]
    first: Compared | None
    forms: tuple[Compared, ...]
    unlike: tuple[Unlike, ...]
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    tolerance: float
    float64: bool

    @property
    def equal(self) -> bool:
        """True if no component differs by more than the tolerance, and the outputs can be compared."""
        return self.first is None and self.difference is not None


@checked
def compare(
    a: AnySpec,
    b: AnySpec,
    *,
    weights: AnyPath | None = None,
    other_weights: AnyPath | None = None,
    allow_change: bool = False,
    batch: Positive = 2,
    length: Positive | None = None,
    seed: Seed = 0,
    tolerance: Tolerance = 1e-5,
    float64: bool = False,
    device: AnyDevice = "cpu",
    dtype: AnyDtype = torch.float32,
) -> Comparison:
    """Run two models on the same tokens.

    Args:
        a: the model to list the components of, or its spec.
        b: another model, or its spec; or the folder of a transformers model; or a file that `torch.jit.save` or
            `torch.export.save` wrote from A.
        weights: the weights of both. By default, the model of a folder has the weights in that folder, and a model
            without weights uses the weights of the other model. Random weights are used if neither has any.
        other_weights: the weights of B, if B is a spec with different ones.
        allow_change: accept weights that were saved with other values than A's; B may always differ from them.
        dtype: the type of both. The files of most published models are bfloat16, in which a single rounding exceeds
            the tolerance.
        batch: number of sequences.
        length: tokens per sequence; by default 16, or the maximum that both accept.
        seed: the seed of the tokens, and of random weights.
        tolerance: the largest difference that counts as equal, relative to the largest value if that is above 1.
        float64: also compare A with A in float64, to distinguish rounding from an error.
        device: the device of both.

    Raises:
        SpecError: the weights do not fit, or B cannot be read; or the two models do not accept the same inputs.
    """
    a, device = as_graph(a), device_of(device)
    b = as_graph(b) if isinstance(b, Graph | Mapping) or is_spec(b) else Path(b)
    second = b if isinstance(b, Graph) else a
    inputs, renamed = common_inputs(a, second, batch=batch, length=length, device=device, seed=seed)
    chosen = weights or a.weights
    source = chosen or _weights_of(b)
    options: dict[str, Any] = {"device": device, "dtype": dtype_of(dtype), "seed": seed}
    model = build_with_weights(a, source, allow_change=allow_change or chosen is None, **options).eval()
    other = other_model(model, b, other_weights or weights or _weights_of(b) or source, **options)
    names = {**other.names, "": ""}

    def run() -> Any:
        return model(**inputs)

    with torch.no_grad():
        ours, order = outputs(model, other.names, run, "A")
        theirs, _ = outputs(other.model, other.names.values(), lambda: other.run(renamed), "B")
        exact: Outputs = {}
        if float64:
            double = copy.deepcopy(model).double()
            wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
            exact, _ = outputs(double, other.names, lambda: double(**wide), "A")
        results = {
            name: _compared(name, names[name], ours[name], theirs.get(names[name]), exact.get(name))
            for name in [*order, ""]
        }
        parts = {name: part for name, part in results.items() if isinstance(part, Compared)}
        equal = {name for name, part in parts.items() if part.relative <= tolerance}
        differ = [name for name in parts if name not in equal]

        def cleared(name: str) -> bool:
            agree = {other for other in equal if parts[other].relative <= FADED * parts[name].relative}
            return _proportional(ours[name], theirs[names[name]]) or bool(depends(model, name, agree, run) & agree)

        first = _first_of(differ, cleared)
    return Comparison(
        difference=parts[""].difference if "" in parts else None,
        parts=tuple(parts.values()),
        first=None if first is None else parts[first],
        forms=tuple(parts[name] for name in differ[: None if first is None else differ.index(first)]),
        unlike=tuple(part for part in results.values() if isinstance(part, Unlike)),
        alone=other.alone,
        tolerance=tolerance,
        float64=float64,
    )


def _first_of(differ: list[str], cleared: Callable[[str], bool]) -> str | None:
    """Return the first component that differs and is not cleared.

    Clearing a component in one layer clears it in all layers.
    """
    cleared_patterns: set[str] = set()
    for name in differ:
        pattern = re.sub(r"\d+", "*", name)
        if not name or (pattern not in cleared_patterns and not cleared(name)):
            return name
        cleared_patterns.add(pattern)
    return None


def _proportional(ours: Tensor, theirs: Tensor) -> bool:
    """Return True if a tensor is the other times a number: tables of transformers return scaled vectors."""
    factor = (ours * theirs).sum() / ours.square().sum()
    return bool(factor > 0 and torch.allclose(theirs, ours * factor, rtol=1e-5, atol=0))


def _weights_of(b: Graph | Path) -> Path | None:
    """Return the folder with the weights of B; None for a spec without weights, and for a program."""
    return b.weights if isinstance(b, Graph) else b if os.path.isdir(b) else None


def is_spec(name: str | os.PathLike[str]) -> bool:
    """Return True for the name of a spec or of a folder with a spec; False for other folders and for programs."""
    path = os.fspath(name)
    return not os.path.exists(path) or path.endswith(SUFFIXES) or os.path.exists(os.path.join(path, SPEC))


def _compared(name: str, other: str, ours: Tensor, theirs: Tensor | None, exact: Tensor | None) -> Compared | Unlike:
    """Compare one component, or return the reason why it cannot be compared."""
    name, other = name or RETURNED, other or RETURNED
    if theirs is None:
        return Unlike(name, other, "it returns a tensor only in A")
    if theirs.shape != ours.shape:
        return Unlike(name, other, f"{list(ours.shape)} in A, {list(theirs.shape)} in B")
    gap = (ours.double() - theirs.double()).abs()
    gap = torch.where(gap.isnan(), torch.inf, gap)
    index = int(gap.argmax())
    place = tuple(int(number) for number in np.unravel_index(index, gap.shape))
    reference = None if exact is None else float((ours.double() - exact).abs().max())
    return Compared(
        name,
        other,
        float(gap.max()),
        max(1.0, float(theirs.abs().max())),
        place,
        (float(ours[place]), float(theirs[place])),
        reference,
    )

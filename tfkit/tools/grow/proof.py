"""The proof of a growth: both models are evaluated in float64 on random inputs, and their outputs are compared."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.building.builder import allocate_tensors, build, evaluation_mode
from tfkit.building.initialize import initialize
from tfkit.building.transfer import Transfer, fill_from_model
from tfkit.graph.expand import Graph
from tfkit.tools.common.memory_needs import MARGIN, check_free, size_of
from tfkit.tools.common.model_inputs import as_tensors, random_inputs
from tfkit.torch_private.dispatch import TO_COPY, DispatchMode

EXACT = 1e-12
"""Largest relative difference of outputs that are equal up to rounding in float64."""
SPREAD = 0.1
"""Standard deviation that is added to random weights, because zeros and ones would hide differences."""


class _InFloat64(DispatchMode):
    """Executes operations that convert to float32, as routers and rotary tables do, in float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is TO_COPY and options.get("dtype") == torch.float32:
            options["dtype"] = torch.float64
        return func(*args, **options)


@dataclass(frozen=True)
class GrowthProof:
    """The model that grows, in the dtype of its weights, and its outputs in float64 for random inputs."""

    graph: Graph
    model: fx.GraphModule
    inputs: Mapping[str, Tensor]
    outputs: Sequence[Tensor]
    folder: Path
    """The folder of its weights, for messages."""

    @classmethod
    def of(cls, graph: Graph, *, seed: int, length: int | None = None) -> GrowthProof:
        """Build the model with its weights or, for a spec without weights, with random weights."""
        if graph.weights is None:
            model = initial_model(graph, seed=seed, dtype=torch.float32)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=SPREAD)
        else:
            model = build(graph)
        inputs = random_inputs(graph, length=length, dtype=torch.float64, seed=seed)
        exact = initial_model(graph, seed=seed)  # in memory only until its outputs are known
        exact.load_state_dict(model.state_dict())
        return cls(graph, model, inputs, _outputs(exact, inputs), graph.weights or Path(graph.spec.file))

    def fill(self, model: fx.GraphModule, weights: Mapping[str, Any]) -> str:
        """Fill a larger model by the `map`, `missing` and `unused` of a run's `weights`."""
        values = {name: weights[name] for name in ("map", "missing", "unused") if name in weights}
        return fill_from_model(model, self.model, self.folder, Transfer(**values, allow_change=True))

    def outputs_of(self, model: fx.GraphModule) -> list[Tensor]:
        """Return the outputs of a larger model for the inputs of the proof."""
        return _outputs(model, self.inputs)

    def difference(self, outputs: Sequence[Tensor], larger: Sequence[Tensor]) -> float:
        """Return the largest difference of the outputs of two models, relative to the largest output.

        Outputs that are not logits may have repeated channels, and there may be logits of more tokens.
        """
        differences = []
        for name, old, new in zip(self.graph.outputs, outputs, larger, strict=True):
            expected, compared = old, new
            if self.graph.node(name).output.type == "logits":
                compared = new[..., : old.size(-1)]
            elif old.shape != new.shape:
                expected = old.repeat_interleave(new.size(-1) // old.size(-1), dim=-1)
            scale = float(expected.abs().max()) or 1.0
            distance = (compared - expected).abs().nan_to_num(nan=math.inf)
            differences.append(float(distance.max()) / scale)
        return max(differences)


def initial_model(graph: Graph, *, seed: int, dtype: torch.dtype = torch.float64) -> fx.GraphModule:
    """Build a model with initial values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(replace(graph, weights=None), device="meta", dtype=dtype)
    check_free(int(size_of(model) * MARGIN), "cpu", f"the larger model in {dtype}", "grow it on a larger machine")
    allocate_tensors(model, "cpu")
    initialize(model, graph, seed)
    return model


def _outputs(model: fx.GraphModule, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    with evaluation_mode(model), torch.no_grad(), _InFloat64():
        return as_tensors(model(**inputs))

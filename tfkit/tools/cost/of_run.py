"""The model of a run as its steps train it, and the FLOPs of a step, for the plan of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfkit.graph.expand import Graph
from tfkit.run.checked_run import Run

if TYPE_CHECKING:
    from tfkit.building.edits import MeasuredModel

# Functions import torch only when they are called.


def trained_model(run: Run) -> Graph | MeasuredModel:
    """Return the model of a run with its adapters, which alone have gradients; without adapters, its graph."""
    if run.config.adapters is None:
        return run.graph
    from tfkit.building.builder import build
    from tfkit.building.edits import MeasuredModel
    from tfkit.run.training.adapters import adapters_description, insert_adapters

    model = build(run.graph, device="meta")
    insert_adapters(model, run)
    return MeasuredModel(run.graph, model, (adapters_description(model),))


def flops_of_step(run: Run, sequences: int, length: int) -> int:
    """Return the FLOPs of a forward and backward pass of a run with all pairs of query and key."""
    return flops_of_model(trained_model(run), sequences, length)


def flops_of_model(model: Graph | MeasuredModel, sequences: int, length: int) -> int:
    """Return the FLOPs of a forward and backward pass of a model with all pairs of query and key."""
    from tfkit.tools.cost.cost import cost

    return cost(model, batch=sequences, length=length).total.flops

"""The FLOPs of a training step, for the plan of a run."""

from __future__ import annotations

from tfkit.graph.expand import Graph


def flops_of_step(graph: Graph, sequences: int, length: int) -> int:
    """Return the FLOPs of a forward and backward pass with all pairs of query and key."""
    from tfkit.tools.cost.cost import cost  # imports torch, so only here

    return cost(graph, batch=sequences, length=length).total.flops

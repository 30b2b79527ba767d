"""The FLOPs of a run, for its length and its plan."""

from __future__ import annotations

from tfkit.graph.expand import Graph


def flops_of_step(graph: Graph, sequences: int, length: int) -> int:
    """Return the FLOPs of a forward and backward with all query-key pairs; see `tfkit.run.checked_run.CountFlops`."""
    from tfkit.tools.cost.cost import cost  # imports torch, so only here

    return cost(graph, batch=sequences, length=length).total.flops

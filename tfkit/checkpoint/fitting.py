"""The check of a file against a model: names, shapes and types, and the semantics of the weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx, nn

from tfkit.checkpoint.files import Checkpoint
from tfkit.checkpoint.links import published
from tfkit.checkpoint.meaning import check_meaning
from tfkit.checkpoint.mismatch import FLOATS, check
from tfkit.checkpoint.weights import WeightMap
from tfkit.graph.expand import Graph


def fitting_map(
    model: nn.Module, graph: Graph, checkpoint: Checkpoint, path: Path, *, allow_change: bool = False
) -> WeightMap:
    """Return the map whose names a file uses: the model's names, or the names of its family.

    Raises:
        SpecError: the file does not contain exactly this model; or it states other semantic values, unless
            `allow_change`.
    """
    weights = nearest_map(model, graph, checkpoint)
    check(weights, model.state_dict(), checkpoint.names, path)
    if not allow_change:
        check_meaning(checkpoint, graph, path)
    return weights


def nearest_map(model: nn.Module, graph: Graph, checkpoint: Checkpoint) -> WeightMap:
    """Return the map with more of the names in a file: the model's names, or the names of its family."""
    family = graph.spec.family
    weights = WeightMap.of_model(model)
    if family is None:
        return weights
    assert isinstance(model, fx.GraphModule)
    theirs = published(model, family).for_names(checkpoint.names)
    return max(weights, theirs, key=lambda candidate: candidate.count_in(checkpoint.names))


def floating_type(checkpoint: Checkpoint) -> torch.dtype:
    """Return the type of a file's tensors; float32 if it has several."""
    types = {info.dtype for info in checkpoint.names.values()} & FLOATS
    return types.pop() if len(types) == 1 else torch.float32

"""The check of a file against a model: its names, shapes and types, and the meaning of its weights."""

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
    """The map whose names a file has: of the model's own names, or of its family.

    Raises:
        SpecError: the file does not hold exactly this model; or states that its weights mean another one, unless
            `allow_change`.
    """
    weights = nearest_map(model, graph, checkpoint)
    check(weights, model.state_dict(), checkpoint.names, path)
    if not allow_change:
        check_meaning(checkpoint, graph, path)
    return weights


def nearest_map(model: nn.Module, graph: Graph, checkpoint: Checkpoint) -> WeightMap:
    """The map that knows more names of a file: of the model's own names, or of its family."""
    family = graph.spec.family
    weights = WeightMap.own(model)
    if family is None:
        return weights
    assert isinstance(model, fx.GraphModule)
    theirs = published(model, family).for_names(checkpoint.names)
    return max(weights, theirs, key=lambda one: one.known(checkpoint.names))


def floating_type(checkpoint: Checkpoint) -> torch.dtype:
    """The type of a file's tensors; float32 if it has several."""
    types = {one.dtype for one in checkpoint.names.values()} & FLOATS
    return types.pop() if len(types) == 1 else torch.float32

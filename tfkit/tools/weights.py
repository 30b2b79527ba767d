"""Weights from a file, by the model's own names or by those of its published checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx, nn

from tfkit.arguments import AnyPath, checked
from tfkit.builder import allocate, build, graph_of, initialize
from tfkit.checkpoint.files import Checkpoint
from tfkit.checkpoint.published import published
from tfkit.checkpoint.report import FLOATS, check
from tfkit.checkpoint.weights import WeightMap
from tfkit.graph.expand import Graph
from tfkit.model import BuiltModel
from tfkit.tools.memory import check_memory


def build_with_weights(
    graph: Graph, path: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> fx.GraphModule:
    """Build a model and fill it from a file, tensor by tensor and never twice in memory.

    Args:
        graph: the model.
        path: safetensors: a file, the index of several, or their folder. The names are those of the model's state
            dict, as `tfkit save` writes them, or those that the `checkpoint` section of its spec says.
        device: where its parameters live.
        dtype: their type; that of the file unless given, or float32 if the file has several.

    Raises:
        SpecError: the file cannot be read, or does not hold exactly this model; a value is not finite; or the memory
            does not suffice.
    """
    path = Path(path)
    with Checkpoint.open(path) as checkpoint:
        model = build(graph, device="meta", dtype=dtype or _dtype(checkpoint))
        weights = checked_map(model, checkpoint, path)
        check_memory(model, device)
        allocate(model, device)
        if len(list(model.buffers())):  # those that no file holds
            initialize(model, graph)
        weights.load(checkpoint, model.state_dict())
    return model


@checked
def load_weights(model: BuiltModel, path: AnyPath) -> None:
    """Fill a model that `tfkit.build` returned from a file, see `build_with_weights`; its type and device stay.

    Raises:
        SpecError: as there; the model is as it was then.
    """
    graph_of(model)
    path = Path(path)
    with Checkpoint.open(path) as checkpoint:
        weights = checked_map(model, checkpoint, path)
        weights.check_values(checkpoint)
        weights.load(checkpoint, model.state_dict(), checked=True)


def checked_map(model: nn.Module, checkpoint: Checkpoint, path: Path) -> WeightMap:
    """The map whose names a file has; raises SpecError unless the file fits it."""
    config = graph_of(model).spec.model.checkpoint
    weights = WeightMap.own(model)
    if config is not None:
        assert isinstance(model, fx.GraphModule)
        theirs = published(model, config).for_names(checkpoint.names)
        weights = max(weights, theirs, key=lambda one: one.known(checkpoint.names))
    check(weights, model.state_dict(), checkpoint.names, path)
    return weights


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    types = {one.dtype for one in checkpoint.names.values()} & FLOATS
    return types.pop() if len(types) == 1 else torch.float32

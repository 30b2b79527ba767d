"""Weights from a file, by the names of the model or of its published checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tfkit.arguments import AnyPath, checked
from tfkit.building.builder import build, build_filled, graph_of
from tfkit.building.edits import MeasuredModel, copied_model
from tfkit.building.model import BuiltModel, complete_model
from tfkit.building.transfer import Transfer
from tfkit.checkpoint.files import TensorFiles
from tfkit.checkpoint.fitting import fitting_map, warn_of
from tfkit.errors import SpecError
from tfkit.graph.expand import Graph
from tfkit.spec.adapter_files import base_folder
from tfkit.spec.folder import tokenizer_in
from tfkit.spec.header import quoted_path
from tfkit.spec.weight_files import changed_weights
from tfkit.tools.common.memory_needs import check_memory


def build_with_weights(
    model: Graph | MeasuredModel,
    path: AnyPath | None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    allow_change: bool = False,
) -> fx.GraphModule:
    """Build a model with the weights of a file, of the folder that the graph was loaded from, or random weights.

    A built model is copied instead, with its weights, and in its dtype by default.

    Raise SpecError as `tfkit.build` does and, before memory is allocated, if the weights do not fit into free memory.
    """
    graph, module = (model.graph, model.module) if isinstance(model, MeasuredModel) else (model, None)
    if module is not None and path is not None:
        raise ValueError("weights have no effect on a built model, which has weights")
    if module is not None:
        return copied_model(module, device=device, dtype=dtype)
    path = graph.weights if path is None else path
    if path is None or torch.device(device).type == "meta":
        return build(graph, device=device, dtype=dtype, seed=seed)
    return build_filled(
        graph,
        Path(path),
        device=device,
        dtype=dtype,
        allow_change=allow_change,
        before=lambda model: check_memory(model, device),
    )


def tokenizer_beside(weights: Path) -> Path | None:
    """Return the file of the tokenizer next to weights, or of the model that their adapter changes; None without one.

    The weights are a file or a folder.
    """
    folder = weights if os.path.isdir(weights) else weights.parent
    return tokenizer_in(folder) or tokenizer_in(base_folder(folder))


def check_weights(path: Path) -> None:
    """Raise SpecError if weights belong to a run and differ from the weights that the run wrote."""
    if (problem := changed_weights(path)) is not None:
        help = problem.help or "use a different checkpoint"
        help += ", or accept the weights with --allow-change, in Python `allow_change=True`"
        raise SpecError(replace(problem, help=help))


@checked
def load_weights(
    model: BuiltModel,
    path: AnyPath,
    *,
    map: Mapping[str, Any] | None = None,
    missing: Sequence[str] = (),
    unused: Sequence[str] = (),
    allow_change: bool | Sequence[str] = False,
) -> None:
    """Fill a model that `tfkit.build` returned from a file; its type and device are unchanged.

    Args:
        model: the model.
        path: safetensors, as for `weights` of `tfkit.build`; with a map, the folder of a model or a run.
        map: names of the model's weights, and for each the name of the weights that fill it, as in the `weights` of a
            run.
        missing: patterns of weights that are not read and keep their values.
        unused: patterns of tensors that the model does not read; with a map, of weights of the model in the folder.
        allow_change: see `tfkit.build`; or patterns of the spec values that may differ.

    Raises:
        SpecError: the file cannot be read, does not contain exactly this model, or has a value that is not finite in
            the dtype of the model. The model is then unchanged.
        ValueError: the model was not built by tfkit, or its parameters are sharded.
    """
    model, path = complete_model(model), Path(path)
    if map or missing or unused or not isinstance(allow_change, bool):
        Transfer(map=map, missing=missing, unused=unused, allow_change=allow_change).filled(model, path)
        return
    with TensorFiles.open(path) as checkpoint:
        weights = fitting_map(model, graph_of(model), checkpoint, path, allow_change=allow_change)
        state = model.state_dict()
        weights.check_values(checkpoint, state)
        weights.load(checkpoint, state, checked=True)
        model.meta |= {"left_out": weights.left_out(checkpoint.names), "filled_from": path.absolute()}
    warn_of(model.meta["left_out"], quoted_path(path))

"""Writes published weights to a file, or to shards with an index if the file would be large."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from tfkit.checkpoint.weights import WeightMap
from tfkit.spec.folder import INDEX, WEIGHTS

MAX_SHARD = 5 * 10**9
"""The maximum number of bytes in a file, unless a single tensor has more."""
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def write_shards(
    weights: WeightMap,
    state: Mapping[str, Tensor],
    folder: Path,
    *,
    metadata: Mapping[str, str],
    max_bytes: int = MAX_SHARD,
) -> list[Path]:
    """Write the tensors of a state dict under the names of their map, with `metadata`, and return the files.

    At most one shard is in memory in addition to the model.
    """
    outlines = weights.tensors({name: tensor.to("meta") for name, tensor in state.items()})
    shards: list[list[str]] = [[]]
    total = size = 0
    for name, tensor in outlines:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + tensor.nbytes, total + tensor.nbytes
    files = [folder / (WEIGHTS if len(shards) == 1 else _name(i, len(shards))) for i in range(len(shards))]
    tensors = weights.tensors(state)
    for names, file in zip(shards, files, strict=True):
        contents = {name: next(tensors)[1].contiguous() for name in names}
        save_file(contents, file, metadata=dict(metadata))
    if len(files) > 1:
        places = {name: file.name for names, file in zip(shards, files, strict=True) for name in names}
        index = folder / INDEX
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}), encoding="utf-8")
        files.append(index)
    return files


def _name(index: int, count: int) -> str:
    return f"model-{index + 1:05}-of-{count:05}.safetensors"

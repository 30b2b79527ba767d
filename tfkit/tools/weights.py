"""Build a model with the weights of a safetensors file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.builder import build, initialize
from tfkit.checkpoint.files import Checkpoint, check_finite
from tfkit.checkpoint.header import TensorInfo
from tfkit.errors import Diagnostic, SpecError, closest, quoted
from tfkit.graph.expand import Graph
from tfkit.tools.memory import check_memory
from tfkit.tools.show import ranges

FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def build_with_weights(
    graph: Graph, path: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> fx.GraphModule:
    """Build a model and fill it from what `save` wrote, tensor by tensor and never twice in memory.

    Args:
        graph: the model.
        path: safetensors with the names of the model's state dict: a file, the index of several, or their folder.
        device: where its parameters live.
        dtype: their type; that of the file unless given, or float32 if the file has several.

    Raises:
        SpecError: the file cannot be read, or does not hold exactly this model; a value is not finite; or the memory
            does not suffice.
    """
    with Checkpoint.open(path) as checkpoint:
        model = build(graph, device="meta", dtype=dtype or _dtype(checkpoint.names))
        check_names(model.state_dict(), checkpoint.names, path)
        check_memory(model, device)
        model.to_empty(device=device)
        if len(list(model.buffers())):  # those that no file holds
            initialize(model, graph)
        state = model.state_dict()
        with torch.no_grad():
            for name, info in checkpoint.names.items():
                value = checkpoint.read(name)
                check_finite(name, value, info.file)
                state[name].copy_(value)
    return model


def check_names(model: Mapping[str, Tensor], file: Mapping[str, TensorInfo], path: Path) -> None:
    """Raise SpecError unless a file holds the tensors of a state dict, all of them, no others, and of its shapes."""
    name = quoted(path.name)
    missing = _collapsed({key: tuple(value.shape) for key, value in model.items() if key not in file})
    surplus = _collapsed({key: held.shape for key, held in file.items() if key not in model})
    both = {key: (file[key], value) for key, value in model.items() if key in file}
    shapes = _collapsed({k: (f.shape, tuple(v.shape)) for k, (f, v) in both.items() if f.shape != tuple(v.shape)})
    types = _collapsed({k: f.dtype for k, (f, v) in both.items() if v.is_floating_point() and f.dtype not in FLOATS})
    found: list[tuple[str, Iterable[str]]] = []
    if missing:
        notes = [f"{key} {list(shape)}{_near(key, surplus)}" for key, shape in missing]
        found.append((f"{name} lacks tensors of the model", notes))
    if surplus:
        found.append((f"{name} has tensors that the model lacks", [f"{key} {list(shape)}" for key, shape in surplus]))
    if shapes:
        notes = [f"{key}: {list(theirs)} in the file, {list(ours)} in the model" for key, (theirs, ours) in shapes]
        found.append((f"{name} has tensors of other shapes than the model", notes))
    if types:
        notes = [f"{key}: {str(type).removeprefix('torch.')}" for key, type in types]
        found.append((f"{name} has tensors that are no floating-point numbers", notes))
    if found:
        raise SpecError(*[Diagnostic(message, notes=tuple(notes)) for message, notes in found])


def _dtype(held: Mapping[str, TensorInfo]) -> torch.dtype:
    types = {one.dtype for one in held.values()} & FLOATS
    return types.pop() if len(types) == 1 else torch.float32


def _near(name: str, surplus: Iterable[tuple[str, Any]]) -> str:
    near = closest(name, [key for key, _ in surplus])
    return f"; the file has {near}" if near else ""


def _collapsed(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The same with one name for all layers that are alike: `decoder.layers.0-11.ffn.up.weight`."""
    groups: dict[tuple[str, Any], list[int]] = {}
    for name, value in values.items():
        number = _NUMBER.search(name)
        key = f"{name[: number.start()]}*{name[number.end() :]}" if number else name
        groups.setdefault((key, value), []).append(int(number[0]) if number else 0)
    return [(key.replace("*", ranges(sorted(ones)).replace(" ", "")), value) for (key, value), ones in groups.items()]

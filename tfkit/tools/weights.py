"""Build a model with the weights of a safetensors file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, fx

from tfkit.builder import build, initialize
from tfkit.errors import Diagnostic, SpecError, closest, quoted
from tfkit.graph.expand import Graph
from tfkit.tools.memory import check_memory
from tfkit.tools.show import ranges

PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""How the files of `torch.save` begin."""
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Held(NamedTuple):
    """A tensor of a file: its type as safetensors names it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


def build_with_weights(
    graph: Graph, path: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> fx.GraphModule:
    """Build a model and fill it from a file as `save` writes it, tensor by tensor and never twice in memory.

    Args:
        graph: the model.
        path: a safetensors file with the names of the model's state dict.
        device: where its parameters live.
        dtype: their type; that of the file unless given, or float32 if the file has several.

    Raises:
        SpecError: the file cannot be read, or does not hold exactly this model; or the memory does not suffice.
    """
    _refuse_pickle(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            held = {name: _held(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            model = build(graph, device="meta", dtype=dtype or _dtype(held))
            check_names(model.state_dict(), held, path)
            check_memory(model, device)
            model.to_empty(device=device)
            if len(list(model.buffers())):  # those that no file holds
                initialize(model, graph)
            with torch.no_grad():
                for name, value in model.state_dict().items():
                    value.copy_(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise SpecError(Diagnostic(f"cannot read the weights {quoted(str(path))}: {cause}")) from error
    return model


def check_names(model: Mapping[str, Tensor], file: Mapping[str, Held], path: Path) -> None:
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
        found.append((f"{name} has tensors that are no floating-point numbers", [f"{k}: {type}" for k, type in types]))
    if found:
        raise SpecError(*[Diagnostic(message, notes=tuple(notes)) for message, notes in found])


def _refuse_pickle(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise SpecError(Diagnostic(f"cannot read the weights {quoted(str(path))}: {error.strerror}")) from error
    if start.startswith(PICKLES):
        raise SpecError(
            Diagnostic(
                f"{quoted(str(path))} is a pickle, which can run any code when it is read",
                help="write its tensors to a safetensors file: "
                "`safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')`",
            )
        )


def _held(tensor: Any) -> Held:
    return Held(tensor.get_dtype(), tuple(tensor.get_shape()))


def _dtype(held: Mapping[str, Held]) -> torch.dtype:
    types = {one.dtype for one in held.values()} & FLOATS.keys()
    return FLOATS[types.pop()] if len(types) == 1 else torch.float32


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

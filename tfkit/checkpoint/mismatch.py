"""Mismatches between a file and a model: all at once, with similar names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfkit.checkpoint.files import TensorInfo
from tfkit.checkpoint.names import NUMBER, matcher
from tfkit.checkpoint.pattern import PatternError
from tfkit.checkpoint.weights import Link, WeightMap
from tfkit.errors import Diagnostic, SpecError, closest, quoted, ranges

FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


def check(weights: WeightMap, state: Mapping[str, Tensor], file: Mapping[str, TensorInfo], path: Path) -> None:
    """Raise SpecError unless a file holds all tensors of a map, no others, and of matching shapes and types."""
    name = quoted(path.name)
    wanted: dict[str, tuple[int, ...]] = {}
    shapes: dict[str, str] = {}
    for link in weights.links:
        views = [tuple(view.shape) for view in weights.views(link, state)]
        wanted |= {one: _shape(link, index, views) for index, one in enumerate(link.file)}
        if all(one in file for one in link.file):
            shapes |= _misfits(link, views, file)
    known = matcher(weights.unread)
    missing = collapsed({one: shape for one, shape in wanted.items() if one not in file})
    surplus = collapsed({k: i.shape for k, i in file.items() if k not in wanted and not known.fullmatch(k)})
    types = collapsed({k: file[k].dtype for k in wanted if k in file and file[k].dtype not in FLOATS})
    found: list[tuple[str, Iterable[str]]] = []
    if missing:
        notes = [f"{key}{f' {list(shape)}' if shape else ''}{_near(key, surplus)}" for key, shape in missing]
        found.append((f"{name} lacks tensors of the model", notes))
    if surplus:
        found.append((f"{name} has tensors that the model lacks", [f"{key} {list(shape)}" for key, shape in surplus]))
    if shapes:
        notes = [f"{key}: {text}" for key, text in collapsed(shapes)]
        found.append((f"{name} has tensors of other shapes than the model", notes))
    if types:
        notes = [f"{key}: {str(type).removeprefix('torch.')}" for key, type in types]
        found.append((f"{name} has tensors that are not floating-point numbers", notes))
    if found:
        raise SpecError(*[Diagnostic(message, notes=tuple(notes)) for message, notes in found])


def _shape(link: Link, index: int, views: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that a tensor of the file must have; None if only the file's other tensors would tell."""
    if link.pattern is None:
        return views[index]
    try:
        return link.pattern.inverse().shapes(views, link.sizes)[index]
    except PatternError:
        return ()


def _misfits(link: Link, views: list[tuple[int, ...]], file: Mapping[str, TensorInfo]) -> dict[str, str]:
    shapes = [file[one].shape for one in link.file]
    if link.pattern is None:
        pairs = zip(link.file, shapes, views, strict=True)
        return {one: f"{list(a)} in the file, {list(b)} in the model" for one, a, b in pairs if a != b}
    try:
        link.pattern.shapes(shapes, link.sizes, views)
    except PatternError as wrong:
        return {link.file[0]: f"{wrong.message}, for {link.own[0]}"}
    return {}


def _near(name: str, surplus: Iterable[tuple[str, Any]]) -> str:
    near = closest(name, [key for key, _ in surplus])
    return f"; the file has {near}" if near else ""


def collapsed(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names with `*` in place of the number of layers that are alike: `decoder.layers.0-11.ffn.up.weight`."""
    groups: dict[tuple[str, Any], list[int]] = {}
    for name, value in values.items():
        number = NUMBER.search(name)
        key = f"{name[: number.start()]}*{name[number.end() :]}" if number else name
        groups.setdefault((key, value), []).append(int(number[0]) if number else 0)
    return [(key.replace("*", ranges(sorted(ones)).replace(" ", "")), value) for (key, value), ones in groups.items()]

"""Conversion of tfkit's weights to the layouts of other libraries, so that all contenders compute the same function."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from peers.shape import Shape

State = Mapping[str, Tensor]


def renamed(state: State, *names: tuple[str, str]) -> dict[str, Tensor]:
    """Apply every replacement to every name, in the given order."""
    weights = {}
    for name, value in state.items():
        new_name = name
        for old, new in names:
            new_name = new_name.replace(old, new)
        weights[new_name] = value
    return weights


def split_heads(state: State, shape: Shape) -> dict[str, Tensor]:
    """Split queries, keys and values into three matrices."""
    keys = shape.n_kv_heads * shape.d_head
    return _cut(state, "project.qkv", {"q": shape.n_heads * shape.d_head, "k": keys, "v": keys})


def split_gate(state: State, shape: Shape) -> dict[str, Tensor]:
    """Split gate and up into two matrices."""
    return _cut(state, "gate_up", {"gate": shape.d_ff, "up": shape.d_ff})


def _cut(state: State, fused: str, parts: Mapping[str, int]) -> dict[str, Tensor]:
    weights = {}
    for name, value in state.items():
        if f".{fused}." not in name:
            weights[name] = value
            continue
        for part, rows in zip(parts, value.split(list(parts.values())), strict=True):
            weights[name.replace(fused, part)] = rows
    return weights


def neighbours(state: State, shape: Shape) -> dict[str, Tensor]:
    """Reorder for rotations that pair channels 2 i and 2 i + 1 of a head; tfkit pairs i and i + d_head / 2."""
    return {
        name: value.unflatten(0, (-1, 2, shape.d_head // 2)).transpose(1, 2).flatten(0, 2)
        if name.endswith(("attention.q.weight", "attention.k.weight"))
        else value
        for name, value in state.items()
    }


def transposed(state: State, endings: tuple[str, ...]) -> dict[str, Tensor]:
    """Transpose matrices to [d_in, d_out]."""
    return {name: value.t() if name.endswith(endings) else value for name, value in state.items()}

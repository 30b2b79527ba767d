"""Random inputs that two models both accept, under the names that each model uses for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tfkit.errors import Diagnostic, SpecError, listing
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import max_len, rows_of
from tfkit.tools.common.inputs import LENGTH, random_inputs

SAME = "compare models that accept the same inputs"
SPECIAL = 4
"""The number of the first ids of a vocabulary to avoid: families use some of them for padding."""


def common_inputs(
    a: Graph, b: Graph, *, batch: int, length: int | None, device: torch.device | str, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return equal random inputs for A and for B.

    Inputs of equal names are equal; each remaining required input corresponds to the next input of its type in the
    other model. Optional inputs that only one model has are omitted. Tokens are from the smaller vocabulary, lengths
    16, or the maximum that both models accept.

    Raises:
        SpecError: a model requires an input that the other does not have, or features of another width; or it does not
            accept that many tokens.
    """
    names = dict(_pairs(a, b))
    for graph, other, paired in ((a, b, set(names)), (b, a, set(names.values()))):
        lost = [name for name, signal in graph.inputs.items() if name not in paired and not signal.optional]
        if lost:
            message = f"`{graph.name}` requires {_listed(graph, lost)}, but `{other.name}` has no such input"
            note = f"`{other.name}` reads {_listed(other, list(other.inputs))}"
            raise SpecError(Diagnostic(message, notes=(note,), help=SAME))
    for name, theirs in names.items():
        widths = a.inputs[name].width, b.inputs[theirs].width
        if widths[0] != widths[1]:
            message = f"`{name}` has vectors of width {widths[0]} in `{a.name}`, but {widths[1]} in `{b.name}`"
            raise SpecError(Diagnostic(message, help=SAME))
    inputs = random_inputs(a, batch=batch, length=_length(a, b, length), device=device, seed=seed)
    ours: dict[str, Tensor] = {}
    for name in names:
        rows = [rows for rows in (rows_of(a, name), rows_of(b, names[name])) if rows]
        tokens = a.inputs[name].type == "tokens"
        ours[name] = _ordinary(inputs[name] % min(rows), name) if tokens and rows else inputs[name]
    return ours, {names[name]: value for name, value in ours.items()}


def _pairs(a: Graph, b: Graph) -> Iterator[tuple[str, str]]:
    """Yield the names in B of A's inputs."""
    equal = {name for name in a.inputs if name in b.inputs and a.inputs[name].type == b.inputs[name].type}
    for type in dict.fromkeys(signal.type for signal in a.inputs.values()):
        rest = [_required(graph, type, equal) for graph in (a, b)]
        yield from zip(*rest, strict=False)
    yield from ((name, name) for name in a.inputs if name in equal)


def _required(graph: Graph, type: str, paired: set[str]) -> list[str]:
    inputs = graph.inputs.items()
    return [name for name, signal in inputs if signal.type == type and not signal.optional and name not in paired]


def _listed(graph: Graph, names: list[str]) -> str:
    return listing(f"`{name}` ({graph.inputs[name].in_words()})" for name in names)


def _length(a: Graph, b: Graph, length: int | None) -> int:
    limits: Mapping[str, int | None] = {graph.name: max_len(graph) for graph in (a, b)}
    for name, limit in limits.items():
        if length is not None and limit is not None and length > limit:
            raise SpecError(Diagnostic(f"`length` must be at most {limit:,}, the limit of `{name}`; got {length:,}"))
    return length or min([LENGTH, *(limit for limit in limits.values() if limit is not None)])


def _ordinary(tokens: Tensor, name: str) -> Tensor:
    """Replace the first tokens of the vocabulary, which may be special tokens."""
    return tokens if name == "token_types" or tokens.max() <= SPECIAL else tokens.clamp(min=SPECIAL)

"""The shapes of a model's inputs, for all code that makes inputs up."""

from __future__ import annotations

from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.decode_split import read_whole
from tfkit.graph.expand import Graph


def input_shapes(
    graph: Graph, *, batch: int, length: int, memory_length: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input of a model: tokens [b, t], features [b, t, width], lengths [b].

    Inputs that are read once and as a whole, such as an encoder's, have `memory_length` positions if it is given;
    inputs of fixed length have that length.
    """
    once = () if memory_length is None else read_whole(graph)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, config in graph.spec.model.inputs.items():
        t = config.length or (memory_length if name in once and memory_length is not None else length)
        if config.type == "features":
            assert config.width is not None, "features have a width"
            shapes[name] = (batch, t, config.width)
        else:
            shapes[name] = (batch,) if config.type == "lengths" else (batch, t)
    return shapes


def fixed_lengths(graph: Graph) -> dict[str, int]:
    """Return the lengths of the inputs whose length the spec fixes."""
    return {name: config.length for name, config in graph.spec.model.inputs.items() if config.length is not None}


def fixed_length(graph: Graph) -> int | None:
    """Return the length of the longest input if all lengths are fixed; None if any is free."""
    fixed = fixed_lengths(graph)
    sequences = [name for name, config in graph.spec.model.inputs.items() if config.type != "lengths"]
    return max(fixed.values()) if fixed and len(fixed) == len(sequences) else None


def length_of(graph: Graph, length: int | None) -> int | None:
    """Return the fixed length of sequences if there is one, else `length`.

    Raises SpecError if a length other than the fixed one is requested.
    """
    fixed = fixed_length(graph)
    if fixed is not None and length not in (None, fixed):
        message = f"length ({length}) has no effect: the input of `{graph.name}` always has {fixed} positions"
        raise SpecError(Diagnostic(message, graph.spec.provenance.span(("inputs",)), "inputs"))
    return fixed or length

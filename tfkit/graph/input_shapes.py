"""Shapes of a model's inputs, and their limits: the length of sequences, and the range of ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tfkit.component import Config, parts
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.decode_split import static_inputs
from tfkit.graph.expand import Graph, as_list


def max_len(graph: Graph) -> int | None:
    """Return the smallest `max_len` in a model, except of its images; None if there is none."""
    return min(_length_limits(graph), default=None)


def max_len_text(limit: int) -> str:
    """Return the words for an exceeded `max_len` that all errors use, including errors in a model's forward."""
    return f"max_len ({limit}), which can be set when building: --set max_len=N"


def _length_limits(graph: Graph) -> Iterator[int]:
    nodes = (node for node in graph.nodes if not node.output.per_image)
    for part in (part for node in nodes for _, part in parts((), node.config)):
        limit = dict(part).get("max_len") if isinstance(part, Config) else None
        if isinstance(limit, int):
            yield limit


def rows_of(graph: Graph, name: str) -> int | None:
    """Return the number of rows of the smallest table that embeds an input; None if there is none."""
    return min(_table_rows(graph, name), default=None)


def _table_rows(graph: Graph, name: str) -> Iterator[int]:
    """Yield the numbers of rows of the tables that embed an input, or of the table of its positions."""
    for node in graph.nodes:
        for field, source in node.wires.items():
            if name not in as_list(source):
                continue
            value = getattr(node.config, field)
            table = node.config.table()
            if isinstance(value, Mapping):
                yield value[name]
            elif node.signals[field].type == "positions":
                yield from [longest] if table is not None and (longest := node.config.position.longest) else []
            elif table is not None and table.rows is not None:
                yield table.rows


def input_shapes(
    graph: Graph, *, batch: int, length: int, memory_length: int | None = None, images: int = 1
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input of a model: tokens [b, t], image [b, channels, height, width], and so on.

    Inputs that are complete before decoding begins, such as an encoder's, have `memory_length` positions if it is set.
    Inputs of fixed length have that length. If a row may have several images, it has `images`.
    """
    static = () if memory_length is None else static_inputs(graph)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, config in graph.spec.model.inputs.items():
        t = config.length or (memory_length if name in static and memory_length is not None else length)
        positions = (t,) if config.is_sequence else (images,) if config.type == "images" else ()
        sizes = tuple(size for size in (config.channels, config.height, config.width) if size is not None)
        shapes[name] = (batch, *positions, *sizes)
    return shapes


def fixed_lengths(graph: Graph) -> dict[str, int]:
    """Return the lengths of the inputs that have a fixed length."""
    return {name: config.length for name, config in graph.spec.model.inputs.items() if config.length is not None}


def fixed_length(graph: Graph) -> int | None:
    """Return the length of the longest input if all lengths are fixed, else None.

    If no input has positions, return the length of the longest sequence in the graph, such as the patches of an image.
    """
    lengths = [config.length for config in graph.spec.model.inputs.values() if config.is_sequence]
    lengths = lengths or [node.output.length for node in graph.nodes if node.output.length is not None]
    return None if None in lengths else max((length for length in lengths if length is not None), default=None)


def length_of(graph: Graph, length: int | None) -> int | None:
    """Return the fixed length of the input sequences if they have one, else `length`.

    Raises SpecError if `length` differs from a fixed length.
    """
    fixed = fixed_length(graph)
    if fixed is not None and length not in (None, fixed):
        message = f"length ({length}) has no effect: the input of `{graph.name}` always has {fixed} positions"
        raise SpecError(Diagnostic(message, graph.spec.provenance.span(("inputs",)), "inputs"))
    return fixed or length

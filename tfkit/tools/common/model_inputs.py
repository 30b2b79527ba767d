"""Random inputs of the right type for any model: for a first forward, and for comparisons with exported files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, fx

from tfkit.building.builder import graph_of, inputs_of
from tfkit.graph.decode_split import DecodeSplit, static_inputs
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import fixed_length, input_shapes, max_len, rows_of

LENGTH = 16
IMAGES = 2
"""Number of images of a row, if it may have several."""


def random_inputs(
    graph: Graph,
    *,
    batch: int = 2,
    length: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    images: int = IMAGES,
) -> dict[str, Tensor]:
    """Return a tensor for each input of a model, by name. The same seed gives the same tensors.

    Sequences have `length` tokens, by default 16 in addition to the placeholders of images, or the model's `max_len` if
    that is smaller. Inputs of a fixed length have that length. `dtype` is the dtype of features, by default torch's
    default dtype.
    """
    counts = _placeholder_counts(graph, images)
    length = length or min(usual_length(graph), max_len(graph) or usual_length(graph))
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Tensor] = {}
    for name, shape in input_shapes(graph, batch=batch, length=length, images=images).items():
        config = graph.spec.model.inputs[name]
        if config.is_real:
            inputs[name] = torch.randn(shape, generator=generator, device="cpu").to(device, dtype)
        elif config.type == "lengths":
            inputs[name] = torch.randint(1, length + 1, shape, generator=generator, device="cpu").to(device)
        elif config.type == "positions":  # increasing, with jumps, repeats and different axes
            steps = torch.randint(3, shape, generator=generator, device="cpu").cumsum(1)
            rows = rows_of(graph, name)
            inputs[name] = (steps if rows is None else steps % rows).to(device)
        else:
            rows = rows_of(graph, name) or 2
            tokens = torch.randint(rows, shape, generator=generator, device="cpu")
            for node, token in _placeholders(graph, name).items():
                tokens = _with_placeholders(tokens, token, counts[node], images, rows)
            inputs[name] = tokens.to(device)
    return inputs


def usual_length(graph: Graph) -> int:
    """Return the number of tokens of a row by default: 16, in addition to the placeholders of images."""
    return LENGTH + sum(_placeholder_counts(graph, IMAGES).values())


def _placeholders(graph: Graph, name: str) -> dict[str, int]:
    """Return the placeholder tokens in an input by the node that replaces their vectors."""
    nodes = [node for node in graph.nodes if "images" in node.signals]
    entries = ((node, field, token) for node in nodes for field, token in node.config.placeholders().items())
    return {node.name: token for node, field, token in entries if node.wires[field] == name}


def _placeholder_counts(graph: Graph, images: int) -> dict[str, int]:
    """Return the number of placeholders in each row by the node that replaces their vectors."""
    nodes = [node for node in graph.nodes if node.config.placeholders() and "images" in node.signals]
    return {node.name: images * (node.signals["images"].image_length or 0) for node in nodes}


def _with_placeholders(tokens: Tensor, token: int, count: int, images: int, rows: int) -> Tensor:
    """Replace tokens [b, t] so that each row has `count` placeholders, after a token that depends on the row, or fewer.

    A token of the text separates two images. Half of a short row remains text; its images have no separators.
    """
    t = tokens.size(1)
    period, length = count // max(1, images) + 1, count + images - 1
    if length > t - 2:
        period, length = t + 1, min(count, t // 2)
    offsets = torch.arange(t) - (torch.arange(tokens.size(0)) % max(1, t - length))[:, None]
    placeholders = (offsets >= 0) & (offsets < length) & (offsets % period != period - 1)
    return tokens.masked_fill(tokens == token, (token + 1) % rows).masked_fill(placeholders, token)


# ---- comparison with an exported file: shapes that differ from the exported example, and padding ----


BATCH, EXAMPLE_LENGTH = 2, 12
"""Batch size and maximum length of the examples that some formats need for the export."""
Padding = Literal["left", "right"]


@dataclass(frozen=True)
class Case:
    """Inputs of a model, and their description in messages."""

    words: str
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True)
class Sequences:
    """Sequences for cached decoding with `length` columns: inputs of the first step, and inputs of every step.

    The inputs include masks. If rows are padded, only the first step has a mask of its tokens.
    """

    words: str
    length: int
    once: Mapping[str, Tensor]
    steps: Sequence[Mapping[str, Tensor]]


def export_inputs(model: fx.GraphModule) -> dict[str, Tensor]:
    """Return the inputs that a file is exported with: all inputs, and all masks."""
    return _call_inputs(model, BATCH, _example_lengths(model)[1], "right", optional=True)


def full_sequence_cases(model: fx.GraphModule) -> Iterator[Case]:
    """Yield full sequences: a single sequence, several sequences of other lengths, padded, with all optional inputs."""
    short, medium, long = _example_lengths(model)
    if (fixed := fixed_length(graph_of(model))) is not None:
        short = medium = long = fixed
    yield Case(f"1 x {long}", _call_inputs(model, 1, long))
    yield Case(f"3 x {short}", _call_inputs(model, 3, short))
    if any(f"{name}_mask" in inputs_of(model) for name in graph_of(model).inputs):
        yield Case(f"3 x {long}, padded on the left", _call_inputs(model, 3, long, "left"))
        yield Case(f"4 x {medium}, padded on the right", _call_inputs(model, 4, medium, "right"))
    if any(signal.optional for signal in graph_of(model).inputs.values()):
        yield Case(f"3 x {long}, with all that is optional", _call_inputs(model, 3, long, optional=True))


def cached_cases(model: fx.GraphModule, parts: DecodeSplit) -> Iterator[Sequences]:
    """Yield three schedules: a prompt and single tokens; padded prompts; single tokens mixed with several tokens."""
    medium = _example_lengths(model)[1]
    yield _decoding_sequences(model, parts, 1, [medium, 1, 1])
    yield _decoding_sequences(model, parts, 3, [max(1, medium - 3), 1, 1], "left")
    yield _decoding_sequences(model, parts, 4, [1, 1, max(1, medium - 3)])


def as_tensors(result: Any) -> list[Tensor]:
    """Return the output of a model, a tensor or several, as a list."""
    return [result] if isinstance(result, Tensor) else list(result)


def _example_lengths(model: fx.GraphModule) -> tuple[int, int, int]:
    """Return a short length, the length that a file is exported with, and a long length."""
    long = min(max_len(graph_of(model)) or EXAMPLE_LENGTH + 7, EXAMPLE_LENGTH + 7)
    medium = max(1, min(EXAMPLE_LENGTH, long - 2))
    return max(1, medium // 2), medium, long


def _call_inputs(
    model: fx.GraphModule, batch: int, length: int, padding: Padding | None = None, *, optional: bool = False
) -> dict[str, Tensor]:
    """Return the inputs of a call. Inputs that are read once have a different length than the remaining inputs."""
    graph, like = graph_of(model), next(model.parameters())
    options: dict[str, Any] = {"batch": batch, "device": like.device, "dtype": like.dtype, "seed": length}
    inputs = random_inputs(graph, length=length, **options)
    shorter = random_inputs(graph, length=max(1, length - 1), **options)
    inputs |= {name: shorter[name] for name in static_inputs(graph)}
    if not optional:
        inputs = {name: value for name, value in inputs.items() if not graph.inputs[name].optional}
    if padding is not None:
        taken = inputs_of(model)
        inputs |= {f"{n}_mask": _padding_mask(x, padding) for n, x in list(inputs.items()) if f"{n}_mask" in taken}
    return inputs


def _padding_mask(x: Tensor, padding: Padding) -> Tensor:
    """Return a mask of x [b, t, ...]: each row has one token fewer than the row above, but at least one token."""
    row = torch.arange(x.size(0), device=x.device)[:, None]
    mask = torch.arange(x.size(1), device=x.device) < (x.size(1) - row).clamp(min=1)
    return mask.flip(1) if padding == "left" else mask


def _decoding_sequences(
    model: fx.GraphModule, parts: DecodeSplit, batch: int, sizes: list[int], padding: Padding | None = None
) -> Sequences:
    long = _example_lengths(model)[2]
    inputs, main = _call_inputs(model, batch, long, optional=True), parts.step_inputs[0]
    once = {name: inputs[name] for name in parts.initial_inputs}
    for name, value in list(once.items()):
        if value.dim() == 1:  # a prefix is read in the first step, also by padded rows
            once[name] = value.clamp(max=max(1, sizes[0] - batch))
        elif f"{name}_mask" in inputs_of(model):
            once[f"{name}_mask"] = _padding_mask(value, "right")
    steps: list[dict[str, Tensor]] = []
    for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        piece = {name: inputs[name][:, start : start + size] for name in parts.step_inputs}
        # Only the first piece has blocks: exported programs read the tokens of the other pieces one by one.
        piece |= {name: piece[name] * (start == 0) for name in parts.block_inputs if name in piece}
        for name in parts.block_inputs - piece.keys() if start else ():
            for token in graph_of(model).node(name).config.placeholders().values():
                piece[main] = piece[main].masked_fill(piece[main] == token, token - 1 if token else 1)
        if start == 0 and padding is not None:
            piece[f"{main}_mask"] = _padding_mask(piece[main], padding)
        steps += [piece] if start + size <= long else []
    words = f"{batch} x {' + '.join(map(str, sizes))} by cached decoding"
    return Sequences(f"{words}, padded on the {padding}" if padding else words, long, once, steps)

"""A family of Hugging Face's models: how small a model to make, its spec of ours, and where its weights go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .mapping import Changed, Source, WeightMap


@dataclass(frozen=True)
class Family:
    """A model of theirs and the spec of ours that should be the same."""

    model: str
    """Name of the class in `transformers`."""
    config: Mapping[str, Any]
    """Sizes and choices for its config."""
    spec: str
    """A shipped spec's name, or the text of a spec."""
    weights: WeightMap
    sets: Mapping[str, object] = field(default_factory=dict)
    """Changes to the spec: path and value."""
    kind: Literal["causal", "encoder", "seq2seq"] = "causal"
    token_types: bool = False
    """Whether it takes token types."""
    position_ids: bool = True
    """Whether it takes position_ids; without them, it must not matter that padding is counted."""
    counts_padding: bool = False
    """Whether padding on the left moves its positions: then each sequence is run alone."""
    length: int = 9
    std: float = 0.25
    """Of all parameters; around 0, or around `norm_mean` for the weights of norms."""
    norm_mean: float = 1.0
    untied_head: bool = False
    """Whether to give it an output matrix of its own, where its code ties one that its checkpoints do not."""
    ignored: tuple[str, ...] = field(default=())
    """Parameters of theirs that are constants."""


def layers(ours: str, theirs: str, parts: Mapping[str, Source]) -> dict[str, Source]:
    """The entries of a weight map for the layers of one stack, without the prefixes."""

    def prefixed(source: Source) -> Source:
        if isinstance(source, Changed):
            return Changed(f"{theirs}.{{i}}.{source.name}", source.change)
        if isinstance(source, str):
            return f"{theirs}.{{i}}.{source}"
        return tuple(f"{theirs}.{{i}}.{name}" for name in source)

    return {f"{ours}.layers.{{i}}.{name}": prefixed(source) for name, source in parts.items()}


def qkv(prefix: str, names: str = "{}_proj") -> tuple[str, ...]:
    """Three projections that we keep in one matrix."""
    return tuple(f"{prefix}.{names.format(letter)}" for letter in "qkv")


def cross(prefix: str, output: str, names: str = "{}_proj") -> dict[str, Source]:
    """The projections of cross-attention, each on its own."""
    projections = {f"cross_attention.project.{x}": f"{prefix}.{names.format(x)}" for x in "qkv"}
    return {**projections, "cross_attention.output": f"{prefix}.{output}"}


def both(path: str, value: object) -> dict[str, object]:
    """The same change in encoder and decoder."""
    return {f"encoder.{path}": value, f"decoder.{path}": value}

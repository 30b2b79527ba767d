"""Stacks: layers of sublayers, each with its norms, around a residual stream."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tfkit.component import NormConfig, ResidualConfig
from tfkit.reference.attention import Scope
from tfkit.reference.model import Array, Part, Value

PLACES = {
    "pre": ["norm_in"],  # https://arxiv.org/abs/2002.04745
    "post": ["norm_after"],  # https://arxiv.org/abs/1706.03762
    "sandwich": ["norm_in", "norm_out"],  # https://arxiv.org/abs/2105.13290
    "output": ["norm_out"],  # https://arxiv.org/abs/2501.00656
    "parallel": ["input_norm"],  # https://arxiv.org/abs/2204.02311
    "parallel_two_norms": ["norm_in"],  # https://arxiv.org/abs/2204.06745
}
"""The norms of each placement; in the last two, sublayers read the layer's input."""
OPEN = dict.fromkeys(("norm_in", "norm_out", "norm_after", "residual", "reads"))
"""A sublayer that leaves all to the placement."""


class Beside(NamedTuple):
    """The values that all layers of a stack read beside the stream."""

    real: Array
    memory: Value | None
    prefix: Value | None
    causal: bool


def stack(
    part: Part, *, input: Value, memory: Value | None = None, prefix: Value | None = None, causal: bool = False
) -> Value:
    """Layers, then a norm. Those of a causal stack, a decoder, read what came before, and the prefix."""
    config, x, names = part.config, input.x, [*_variants(part.config)]
    beside = Beside(input.real, memory, prefix, causal)
    for number, name in enumerate(names):
        layer = part.at(f"layers.{number}", config if name == "base" else config.layers.variants[name])
        for _ in range(config.n_layers // len(names)):
            x = _layer(layer, x, beside)
    norm = _norm(config, config.final_norm, preset=config.placement != "post")
    return Value(part.optional("final_norm", norm, x), input.real)


def _variants(config: Any) -> Iterator[str]:
    """The variant of each layer with weights of its own."""
    layers = config.layers
    n = (layers and layers.groups) or config.n_layers
    pattern = (layers and layers.pattern) or ["base"]
    if isinstance(pattern, dict):
        ends = {key: [int(end) % n for end in re.findall(r"^-?\d+|\d+$", key)] for key in pattern}
        placed = {i: pattern[key] for key, at in ends.items() if at for i in range(at[0], at[-1] + 1)}
        yield from (placed.get(i) or pattern["rest"] for i in range(n))
    else:
        counted = [(name, int(times or 1)) for name, _, times in (word.partition("*") for word in pattern)]
        cycle = [name for name, times in counted for _ in range(times)]
        yield from (cycle[i % len(cycle)] for i in range(n))


def _layer(part: Part, x: Array, beside: Beside) -> Array:
    """Sublayer by sublayer: x = norm_after(onto + scale * norm_out(sublayer(norm_in(x))))."""
    config, places, times = part.config, PLACES[part.config.placement], Counter[str]()
    start = part.optional("input_norm", _norm(config, config.input_norm, "input_norm" in places), x)
    for step in _sublayers(config, beside):
        kind = step["sublayer"]
        times[kind] += 1
        name = kind if times[kind] == 1 else f"{kind}_{times[kind]}"
        norms = {place: _norm(config, step[place], place in places) for place in ("norm_in", "norm_out", "norm_after")}
        reads = step["reads"] or ("input" if config.placement.startswith("parallel") else "previous")
        inside = part.optional(f"{name}_norm_in", norms["norm_in"], start if reads == "input" else x)
        y = part.optional(f"{name}_norm_out", norms["norm_out"], _sublayer(part, kind, name, inside, beside))
        residual = step["residual"] or config.residual or ResidualConfig()
        onto = x if residual.onto == "previous" else inside
        if residual.learned != "none":  # https://arxiv.org/abs/2103.17239
            y = y * part.weight(f"{name}_residual_scale.weight")
        if residual.learned_onto != "none":
            onto = onto * part.weight(f"{name}_residual_scale_onto.weight")
        x = part.optional(f"{name}_norm_after", norms["norm_after"], onto + residual.scale * y)
    return part.record(x)


def _norm(config: Any, given: NormConfig | bool | None, preset: bool) -> NormConfig | None:
    """The norm of a place: that which is given, the stack's for true, or what the preset says."""
    given = preset if given is None else given
    return (config.norm if given else None) if isinstance(given, bool) else given


def _sublayers(config: Any, beside: Beside) -> list[dict[str, Any]]:
    """The sublayers in order."""
    if config.sublayers is not None:
        return [dict(one) for one in config.sublayers]
    crosses = beside.memory is not None and (config.cross_attention or config.attention)
    filled = {"attention": config.attention, "cross_attention": crosses, "ffn": config.ffn}
    return [{**OPEN, "sublayer": name} for name, component in filled.items() if component]


def _sublayer(part: Part, kind: str, name: str, x: Array, beside: Beside) -> Array:
    config, memory = part.config, beside.memory
    if kind == "ffn":
        return part.at(name, config.ffn)(x)
    if kind == "attention":
        return part.at(name, config.attention)(x, _own_scope(part, x, beside))
    assert memory is not None
    scope = Scope(memory.x, np.tile(memory.real, (len(x), 1)))
    return part.at(name, config.cross_attention or config.attention)(x, scope)


def _own_scope(part: Part, x: Array, beside: Beside) -> Scope:
    """The scope of self-attention: its window (https://arxiv.org/abs/2004.05150) and the prefix, without padding.

    Every query reads the prefix: https://arxiv.org/abs/1910.10683, section 3.2.1.
    """
    config, positions = part.config.attention, count(beside.real)
    left, right = (None, 0 if beside.causal else None) if config.mask is None else (config.mask.left, config.mask.right)
    ahead = positions - positions[:, None]
    visible = (ahead >= (-np.inf if left is None else -left)) & (ahead <= (np.inf if right is None else right))
    if beside.prefix is not None:
        visible |= positions < beside.prefix.x
    return Scope(x, visible & beside.real, positions, right == 0, _position(part))


def _position(part: Part) -> Part | None:
    """The position of a layer's attention; its weights belong to the stack, since layers may share them."""
    node, _, number = part.path.split(".")
    stack, config = part.model.graph.node(node).stack, part.config.attention.position
    assert stack is not None
    shared = stack.layers[int(number)].context
    return None if config is None else Part(part.model, f"{node}.{shared}.position", config)


def count(real: Array) -> Array:
    """The position of each token: padding takes none, and in a mask of pairs, tokens that it may not read take none."""
    return np.maximum((np.cumsum(real) if real.ndim == 1 else np.tril(real).sum(1)) - 1, 0)

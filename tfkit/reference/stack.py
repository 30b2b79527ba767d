"""Stacks: layers of sublayers, each with its norms, around a residual stream."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from keyword import iskeyword
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tfkit.component import MaskConfig, NormConfig, ResidualConfig, Step
from tfkit.reference.attention import Scope
from tfkit.reference.model import Array, Part, Value

NORMS = {
    "pre": ["norm_in", "final_norm"],  # https://arxiv.org/abs/2002.04745
    "post": ["norm_after"],  # https://arxiv.org/abs/1706.03762
    "sandwich": ["norm_in", "norm_out", "final_norm"],  # https://arxiv.org/abs/2105.13290
    "output": ["norm_out", "final_norm"],  # https://arxiv.org/abs/2501.00656
    "parallel": ["input_norm", "final_norm"],  # https://arxiv.org/abs/2204.02311
    "parallel_two_norms": ["norm_in", "final_norm"],  # https://arxiv.org/abs/2204.06745
}
"""The norms of each placement. In the last two, sublayers take the layer's input."""
Scopes: TypeAlias = dict[str, tuple[Scope, ...]]
"""By type of sublayer, the scopes that it takes in addition to x: one or none."""


class StackRow(NamedTuple):
    """A sequence: the positions of its tokens, [t], and the vector of its condition, [width]."""

    tokens: Array
    condition: Array | None
    features: Array | None
    """The features of the layer, [t, width]."""


def stack(
    part: Part,
    *,
    input: Value,
    memory: Value | None = None,
    prefix: Value | None = None,
    condition: Value | None = None,
    layer_features: Value | None = None,
    positions: Value | None = None,
    blocks: Value | None = None,
    causal: bool = False,
) -> Value:
    """Apply layers, then a norm. In a causal stack, a decoder, positions attend to earlier positions and the prefix."""
    config, x, names = part.config, input.x, [*_variants(part.config)]
    order, shared = _order(config, len(names)), [*_shared(config, names, causal)]
    resolved = part.graph.node(part.path).stack
    assert resolved is not None
    if resolved.streams is not None:
        x = part.at("enter", resolved.streams)("enter", x)
    features = np.split(layer_features.x, config.n_layers, axis=1) if layer_features else [None] * config.n_layers
    wires = dict[str, Array]()
    for run, number in enumerate(order):
        name, row = names[number], StackRow(input.tokens, condition.x if condition else None, features[run])
        layer = part.at(f"layers.{number}", _layer_config(config, name))
        attention = layer.config.attention
        location = "relative" if attention is not None and attention.content_scores is not None else "position"
        position = part.at(f"{shared[number]}.{location}", attention and attention.position)
        rule = part.at(f"{shared[number]}.rule", attention and attention.mask and attention.mask.rule)
        scopes = _scopes(layer.config, position, rule, input, memory, prefix, causal, wires, positions, blocks)
        x = _layer(layer, x, scopes, row)
    if resolved.streams is not None:
        x = part.at("leave", resolved.streams)("leave", x)
    return Value(_normed(part, "final_norm", config.final_norm, x, row), input.pairs)


def _order(config: Any, n: int) -> list[int]:
    """Return the number of the layer at each depth, of `n` layers that have separate weights."""
    order, times = config.layers and config.layers.order, config.n_layers // n
    if isinstance(order, tuple):
        return list(order)
    looped = order == "looped"  # https://arxiv.org/abs/1807.03819
    return [run % n if looped else run // times for run in range(config.n_layers)]


def _variants(config: Any) -> Iterator[str]:
    """Yield the variant of each layer that has separate weights."""
    layers = config.layers
    listed = len({*layers.order}) if layers and isinstance(layers.order, tuple) else None
    n = listed or (layers and layers.groups) or config.n_layers
    pattern = (layers and layers.pattern) or ["base"]
    if isinstance(pattern, dict):
        ends = {key: [int(end) % n for end in re.findall(r"^-?\d+|\d+$", key)] for key in pattern}
        placed = {i: pattern[key] for key, at in ends.items() if at for i in range(at[0], at[-1] + 1)}
        yield from (placed.get(i) or pattern["rest"] for i in range(n))
    else:
        counted = [(name, int(times or 1)) for name, _, times in (word.partition("*") for word in pattern)]
        cycle = [name for name, times in counted for _ in range(times)]
        yield from (cycle[i % len(cycle)] for i in range(n))


def _layer_config(config: Any, name: str) -> Any:
    """Return the config of a variant of the layers."""
    return config if name == "base" else config.layers.variants[name]


def _shared(config: Any, names: Sequence[str], causal: bool) -> Iterator[str]:
    """Yield for each layer the path of the weights of its positions and of its mask rule.

    Layers of equal positions, masks, heads and temperatures share these weights, under the name of the first layer's
    variant. If the position is not shared, each layer has its own weights, under its number.
    """
    owners = dict[Any, str]()
    for number, name in enumerate(names):
        attention = _layer_config(config, name).attention
        if attention is None:
            yield "shared"  # without positions
            continue
        position, mask = attention.position, attention.mask or MaskConfig(right=0 if causal else None)
        if position is not None and not position.is_shared:
            yield f"shared.{number}"
            continue
        heads = position and (attention.n_heads, attention.head_width)
        key = (position, mask, heads, attention.query_temperature)
        owner = owners.setdefault(key, name)
        yield f"shared.{owner}_" if iskeyword(owner) else f"shared.{owner}"


def _scopes(
    config: Any,
    position: Part,
    rule: Part,
    input: Value,
    memory: Value | None,
    prefix: Value | None,
    causal: bool,
    wires: dict[str, Array],
    of_tokens: Value | None,
    blocks: Value | None,
) -> Scopes:
    """Return the scopes that each kind of sublayer takes in addition to x: window and prefix without padding.

    Masks count the tokens. The positions of the scope are `of_tokens`, by default counted as well.

    Windows: https://arxiv.org/abs/2004.05150. The prefix: https://arxiv.org/abs/1910.10683, section 3.2.1.
    Blocks: https://arxiv.org/abs/2503.19786, section 2, and https://arxiv.org/abs/2407.07726, section 3.2.
    """
    scopes, attention = dict[str, tuple[Scope, ...]](), config.attention
    if config.mixer is not None:
        scopes["mixer"] = ()
    if attention is not None:
        mask, positions = attention.mask, input.positions
        left, right = (None, 0 if causal else None) if mask is None else (mask.left, mask.right)
        ahead = positions - positions[:, None]
        ahead = ahead if blocks is None else np.where(_same_block(blocks.x, input), np.minimum(ahead, 0), ahead)
        visible = (ahead >= (-np.inf if left is None else -left)) & (ahead <= (np.inf if right is None else right))
        if prefix is not None:
            visible |= positions < prefix.x
        if rule.config is not None:
            visible &= replace(rule, trace=[])(positions[:, None], positions[None])
        visible &= input.pairs
        positions = positions if of_tokens is None else of_tokens.x
        both_ways = prefix is not None or blocks is not None
        scopes["attention"] = (Scope(visible, None, positions, right == 0, both_ways, position, wires),)
    if memory is not None and (config.cross_attention or attention):
        scopes["cross_attention"] = (Scope(np.tile(memory.tokens, (len(input.x), 1)), memory.x),)
    return scopes if config.ffn is None else {**scopes, "ffn": ()}


def _same_block(numbers: Array, input: Value) -> Array:
    """Return where two tokens are in one run of tokens with the same number above 0, [q, k]."""
    same = np.zeros_like(input.pairs)
    for start in np.flatnonzero(input.tokens & (numbers > 0)):
        for end in range(start, len(numbers)):
            if input.tokens[end] and (numbers[end] != numbers[start] or not input.pairs[start, end]):
                break
            same[start, end] = same[end, start] = input.tokens[end]
    return same


def _layer(part: Part, x: Array, scopes: Scopes, row: StackRow) -> Array:
    """Apply sublayers one after the other. The names of repeated sublayers of a type are numbered."""
    config, times = part.config, Counter[str]()
    stream, around, state = x, config.around, None
    if around is not None:
        x, state = _read(part.at("residual_read", around), stream, row)
    start = _normed(part, "input_norm", config.input_norm, x, row)
    for step in [{"sublayer": kind} for kind in scopes] if config.sublayers is None else map(dict, config.sublayers):
        kind = step["sublayer"]
        times[kind] += 1
        name = kind if times[kind] == 1 else f"{kind}_{times[kind]}"
        reads = step.get("reads") or ("input" if config.placement.startswith("parallel") else "previous")
        x = _step(part, name, step, x, start if reads == "input" else x, row, *scopes[kind])
    if around is not None:
        x = part.at("residual_write", around)("write", stream, x, state)
    return part.record(x)


def _step(part: Part, name: str, step: Mapping[str, Any], x: Array, read: Array, row: StackRow, *scope: Scope) -> Array:
    """Compute norm_after(onto + scale * norm_out(sublayer(norm_in(read)))), where `onto` is x or the sublayer's input.

    Residuals other than `add` compute the input of the sublayer, and write its output to the stream.
    """
    config = part.config
    component = dict(config)[step["sublayer"]] or config.attention  # which cross-attention may share
    residual = step.get("residual") or config.residual or ResidualConfig()
    added, state = isinstance(residual, ResidualConfig), None
    if not added:
        read, state = _read(part.at(f"{name}_residual_read", residual), x, row)
    inside = _normed(part, "norm_in", step.get("norm_in"), read, row, name)
    sublayer = part.at(name, component)
    ordered = step["sublayer"] == "mixer" or Step(name, component).ordered
    y = _of_tokens(sublayer, inside, row) if ordered else sublayer(inside, *scope)
    y = _normed(part, "norm_out", step.get("norm_out"), y, row, name)
    if not added:
        x = part.at(f"{name}_residual_write", residual)("write", x, y, state)
        return _normed(part, "norm_after", step.get("norm_after"), x, row, name)
    onto = {"previous": x, "normed": inside, "nothing": np.zeros_like(x)}[residual.onto]
    if residual.learned != "none":  # https://arxiv.org/abs/2103.17239
        y = y * part.weight(f"{name}_residual_scale.weight")
    if residual.learned_onto != "none":
        onto = onto * part.weight(f"{name}_residual_scale_onto.weight")
    x = residual.scale_onto * onto + residual.scale * y
    return _normed(part, "norm_after", step.get("norm_after"), x, row, name)


def _read(residual: Part, x: Array, row: StackRow) -> Any:
    """Return the value that a residual reads from the stream, and the values for its `write`."""
    features = [row.features] if residual.config.takes_features else []
    return residual("read", x, row.condition, *features)


def _of_tokens(mixer: Part, x: Array, row: StackRow) -> Array:
    """Apply a mixer or FFN to the tokens without padding. It has no trace, because rows differ in length."""
    y, tokens = np.zeros_like(x), row.tokens
    features = [row.features[tokens]] if mixer.config.takes_features and row.features is not None else []
    y[tokens] = replace(mixer, trace=[])(x[tokens], *features)
    return y


def _normed(part: Part, location: str, norm: NormConfig | bool | None, x: Array, row: StackRow, of: str = "") -> Array:
    """Apply the norm at a place: a config; the stack's norm for True; for None, the norm of the placement."""
    norm = location in NORMS[part.config.placement] if norm is None else norm
    norm = norm if isinstance(norm, NormConfig) else part.config.norm if norm else None
    condition = [row.condition] if norm is not None and norm.takes_condition else []
    return part.at(f"{of}_{location}".lstrip("_"), norm)(x, *condition)

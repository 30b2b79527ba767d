"""Blocks that are not stacks: embedding, heads, and nodes that join values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tfkit.component import ResidualConfig
from tfkit.reference.model import Array, Function, Part, Value, rows
from tfkit.reference.stack import stack

STAGES = ("scale", "position", "tables", "norm", "dropout", "project")


def embedding(
    part: Part,
    *,
    input: Value,
    tie: Array | None = None,
    tables: Sequence[Value | None] = (),
    positions: Value | None = None,
) -> Value:
    """Look up rows of the token table, then apply scale, positions, tables, norm and projection as `stages` orders."""
    config = part.config
    x = rows(part.weight("tokens.weight") if tie is None else tie, input.x)
    for stage in config.stages or STAGES:
        if stage == "scale" and config.scale is not None:
            x = x * (config.d_model**0.5 if config.scale == "sqrt_d_model" else config.scale)
        elif stage == "position" and config.position is not None:
            of_tokens = input.positions if positions is None else positions.x
            x = x + part.at("position", config.position)(of_tokens, x.shape[1])
        elif stage == "tables":
            for name, ids in zip(config.tables or {}, tables, strict=True):
                x = x + rows(part.weight(f"tables.{name}.weight"), np.zeros(len(x), int) if ids is None else ids.x)
        elif stage == "norm":
            x = part.at("norm", config.norm)(x)
        elif stage == "project" and config.d_embed is not None:
            x = part.at("project").linear(x, config.project_bias)
    return Value(x, input.pairs)


def lm_head(part: Part, *, input: Value, tie: Array | None = None) -> Value:
    """Compute softcap(scale * (matrix @ x + bias)), after a projection or the transform of masked language models."""
    config, x = part.config, _transformed(part, input.x)
    if config.transform is None and config.d_embed is not None:
        x = part.at("project").linear(x, config.project_bias)
    y = x @ (part.weight("output.weight") if tie is None else tie).T
    y = (config.scale or 1) * (y + (part.weight("output.bias") if config.bias else 0))
    return Value(y if config.softcap is None else config.softcap * np.tanh(y / config.softcap), input.pairs)


def _transformed(part: Part, x: Array) -> Array:
    """Return a dense layer, its activation and a norm, if the head has a transform."""
    config = part.config.transform
    if config is None:
        return x
    x = part.at("activation", config.activation)(part.at("dense").linear(x, config.bias))
    return part.at("norm", config.norm)(x)


def classifier(part: Part, *, input: Value) -> Value:
    """Multiply each position by a matrix, after the transform if there is one."""
    logits = part.at("output").linear(_transformed(part, input.x), part.config.bias)
    return Value(logits[..., 0] if part.config.squeeze else logits, input.pairs)


def pooler(part: Part, *, input: Value) -> Value:
    """Select the first token, the last, or the mean of all, then apply a dense layer and its activation."""
    pooled = np.asarray(input.tokens.any())
    x = input.x[input.tokens] if pooled else input.x
    x = {"first": x[0], "last": x[-1], "mean": x.mean(0)}[part.config.select]
    if part.config.activation is not None:
        x = part.at("activation", part.config.activation)(part.at("dense").linear(x, bias=True))
    return Value(x, pooled)


def linear(part: Part, *, input: Value) -> Value:
    """Return a linear layer on each position, and an activation."""
    config = part.config
    layer = part if config.activation is None else part.at("dense")
    return Value(part.at("activation", config.activation)(layer.linear(input.x, config.bias)), input.pairs)


def concat(part: Part, *, inputs: Sequence[Value]) -> Value:
    """Concatenate along positions, padding included, or along width with the padding of the first input."""
    if part.config.along == "width":
        return Value(np.concatenate([value.x for value in inputs], axis=-1), inputs[0].pairs)
    tokens = np.concatenate([value.tokens for value in inputs])
    return Value(np.concatenate([value.x for value in inputs]), np.tile(tokens, (len(tokens), 1)))


def latents(part: Part, *, input: Value) -> Value:
    """Return the learned sequence, which has no padding."""
    return Value(part.weight("weight"), np.ones((part.config.n_latents,) * 2, bool))


def one_layer(part: Part, **values: Value) -> Value:
    """Apply the stack of one layer that a layer or a sublayer is as a node."""
    config = part.config.as_stack()
    return stack(replace(part, config=config), causal=config.kind_name() == "decoder", **values)


def residual(part: Part, *, inputs: Sequence[Value]) -> Value:
    """Add the output of a sublayer to the stream, each times its factors."""
    config, (x, y) = part.config.residual, (value.x for value in inputs)
    if not isinstance(config, ResidualConfig):
        return Value(part.at("write", config)("write", x, y, None), inputs[0].pairs)
    if config.learned != "none":
        y = y * part.weight("scale.weight")
    if config.learned_onto != "none":
        x = x * part.weight("scale_onto.weight")
    return Value(config.scale_onto * x + config.scale * y, inputs[0].pairs)


BLOCKS: dict[str, Function] = {
    **{function.__name__: function for function in (embedding, latents, lm_head, pooler, classifier, linear, concat)},
    **dict.fromkeys(("layer", "attention", "cross_attention", "mixer"), one_layer),
    "residual": residual,
    "ffn": lambda part, input: Value(replace(part, config=part.config.ffn)(input.x), input.pairs),
    "encoder": stack,
    "decoder": partial(stack, causal=True),
    "norm": lambda part, input: Value(replace(part, config=part.config.norm)(input.x), input.pairs),
    "add": lambda part, inputs: Value(np.sum([value.x for value in inputs], axis=0), inputs[0].pairs),
}

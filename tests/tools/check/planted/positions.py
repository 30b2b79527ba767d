"""Bugs of positions: the numbering of tokens, and its use in attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfkit.components import embedding, head, longrope, rope, rope_scaling, score_bias
from tfkit.components.context import AttentionContext

from .bug import plant

count_positions = embedding.count_positions
forward_of_alibi = score_bias.Alibi.forward
bucket = score_bias.T5Bias.bucket
forward_of_context = AttentionContext.forward
forward_of_dynamic = rope_scaling.DynamicScaling.forward
forward_of_longrope = longrope.LongRopeScaling.forward
forward_of_table = rope.RotaryTable.forward
rotate_half = rope.RotateHalf.forward


@plant(
    "positions ignore left padding", "huggingface/transformers#22161", "gpt2", "padding", embedding, "count_positions"
)
def columns(x: Tensor, mask: Any, past: Any) -> Tensor:
    return count_positions(x, None, past)


@plant(
    "the first row's positions serve the entire batch",
    "unslothai/unsloth#3699",
    "gpt2",
    "padding",
    embedding,
    "count_positions",
)
def of_the_first_row(x: Tensor, mask: Any, past: Any) -> Tensor:
    return count_positions(x, mask, past)[:1]


@plant(
    "positions restart at every decoded token", "ml-explore/mlx-lm#93", "gpt2", "cached", embedding, "count_positions"
)
def restarted(x: Tensor, mask: Any, past: Any) -> Tensor:
    return count_positions(x, mask, None)


@plant(
    "ALiBi is zero for every decoded token", "keras-team/keras-hub#2861", "bloom", "cached", score_bias.Alibi, "forward"
)
def no_bias_of_one(self: Any, queries: Tensor, keys: Tensor) -> Tensor:
    return forward_of_alibi(self, queries, keys) * (queries.size(1) > 1)


@plant("ALiBi rewards distance", "the sign of a slope", "bloom", "meaning", score_bias.Alibi, "forward")
def far_is_near(self: Any, queries: Tensor, keys: Tensor) -> Tensor:
    return -forward_of_alibi(self, queries, keys)


@plant(
    "T5's buckets of both directions serve a decoder",
    "half of the buckets are never used",
    "t5",
    "meaning",
    score_bias.T5Bias,
    "bucket",
)
def both_sides(self: Any, offset: Tensor) -> Tensor:
    self.causal, sides = False, self.sides
    self.sides = sides // 2
    actual = bucket(self, offset)
    self.causal, self.sides = True, sides
    return actual


@plant(
    "longrope always uses the long factors",
    "ml-explore/mlx-lm#660",
    "longrope",
    "meaning",
    longrope.LongRopeScaling,
    "forward",
)
def always_long(self: Any, n_keys: int, device: Any) -> Tensor:
    return self.unscaled(self.theta, device) / torch.tensor(self.long)


@plant("the rotation turns the other way", "the sign of a sine", "llama", "meaning", rope.RotateHalf, "forward")
def other_way(self: Any, x: Tensor, table: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * table[0] - torch.cat((second, first), dim=-1) * table[1]


@plant(
    "the last token is counted, not found",
    "huggingface/transformers#46782",
    "pooled",
    "padding",
    head.SelectLast,
    "forward",
)
def counted_last(self: Any, x: Tensor, mask: Any) -> Tensor:
    return x[:, -1] if mask is None else x[torch.arange(x.size(0)), mask.sum(dim=1) - 1]


@plant(
    "positions of the longest row are used for all",
    "ndif-team/nnsight#672",
    "gpt2",
    "padding",
    embedding,
    "count_positions",
)
def of_the_longest(x: Tensor, mask: Any, past: Any) -> Tensor:
    return count_positions(x, mask, past).amax(dim=0, keepdim=True)


@plant(
    "padding on the left is taken off positions twice",
    "fla-org/flash-linear-attention#902",
    "vaswani",
    "padding",
    embedding,
    "count_positions",
)
def offset(x: Tensor, mask: Any, past: Any) -> Tensor:
    actual = count_positions(x, mask, past)
    return actual if mask is None else actual - (~mask).sum(dim=1, keepdim=True)


@plant(
    "rotary rows of padding are never written",
    "fla-org/flash-linear-attention#967",
    "llama",
    "padding",
    AttentionContext,
    "forward",
)
def unwritten(self: Any, x: Tensor, padding: Any, *rest: Any) -> Any:
    actual = forward_of_context(self, x, padding, *rest)
    if padding is None or actual.rotary is None:
        return actual
    return actual._replace(rotary=torch.where(padding[:, None, :, None], actual.rotary, torch.nan))


@plant(
    "dynamic scaling takes the number of heads for the length",
    "ml-explore/mlx-lm#1553",
    "dynamic",
    "meaning",
    rope_scaling.DynamicScaling,
    "forward",
)
def by_heads(self: Any, n_keys: int, device: Any) -> Tensor:
    return forward_of_dynamic(self, 4, device)


@plant("rotary positions are doubled", "ml-explore/mlx-lm#1553", "dynamic", "meaning", rope.RotaryTable, "forward")
def doubled(self: Any, positions: Tensor, n_keys: int) -> Tensor:
    return forward_of_table(self, positions * 2, n_keys)


@plant(
    "heads between two powers of two have the slopes of the next power",
    "slopes in one series",
    "slopes",
    "meaning",
    score_bias.AlibiConfig,
    "slopes",
)
def one_series(self: Any, attention: Any) -> list[float]:
    return [2.0 ** (-self.max_slope_exponent * (head + 1) / attention.n_heads) for head in range(attention.n_heads)]


@plant(
    "T5's far distances share one bucket", "a logarithm that is missing", "t5", "meaning", score_bias.T5Bias, "bucket"
)
def without_logarithm(self: Any, offset: Tensor) -> Tensor:
    distance = (-offset).clamp(min=0) if self.causal else offset.abs()
    near = torch.where(distance < self.near, distance, self.sides - 1)
    return near if self.causal else near + (offset > 0).long() * self.sides


@plant(
    "longrope takes the long factors at exactly its trained length",
    "a strict comparison",
    "longrope",
    "meaning",
    longrope.LongRopeScaling,
    "forward",
)
def long_one_token_early(self: Any, n_keys: int, device: Any) -> Tensor:
    return forward_of_longrope(self, n_keys + 1, device)


@plant(
    "heads are rotated by the positions of rows",
    "two exchanged axes",
    "rotated",
    "meaning",
    rope.RotateHalf,
    "forward",
)
def rows_for_heads(self: Any, x: Tensor, table: Tensor) -> Tensor:
    if x.size(0) == x.size(1) == table.size(1):
        table = table.transpose(1, 2)
    return rotate_half(self, x, table)


@plant(
    "rotary positions are rounded to bfloat16",
    "a table in a small type",
    "llama",
    "meaning",
    rope.RotaryTable,
    "forward",
)
def rounded(self: Any, positions: Tensor, n_keys: int) -> Tensor:
    return forward_of_table(self, positions.bfloat16(), n_keys)

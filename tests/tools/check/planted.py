"""Bugs of other projects, planted by replacing one method: each breaks a property, and the test names it.

`where` is the public report of such a bug, or a word for a mistake that is easily made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit.initialize
from tfkit.components import (
    alibi,
    context,
    embedding,
    feedforward,
    head,
    layer,
    longrope,
    norm,
    relative_bias,
    rope,
    rope_scaling,
    stack,
)
from tfkit.components.attention import CrossAttention
from tfkit.components.attention_core import Eager, ScaledDotProduct
from tfkit.components.context import AttentionContext
from tfkit.decoding import cached as decoding
from tfkit.decoding import modules
from tfkit.nn import Context, Past

Patch = tuple[Any, str, Any]


@dataclass(frozen=True)
class Bug:
    """A planted bug.

    Attributes:
        bug: what is wrong, in a few words.
        where: the public thread about one like it.
        model: the model that has it, one of `models.MODELS`.
        red: the property that must break.
        patches: the objects, their attributes, and what stands there instead.
    """

    bug: str
    where: str
    model: str
    red: str
    patches: tuple[Patch, ...]


BUGS: list[Bug] = []


def plant(bug: str, where: str, model: str, red: str, owner: Any, name: str) -> Callable[[Any], Any]:
    """A bug whose patch is the function below."""

    def add(function: Any) -> Any:
        BUGS.append(Bug(bug, where, model, red, ((owner, name, function),)))
        return function

    return add


visible, held, place = AttentionContext.visible, context.held, context.place
count_positions = embedding.count_positions
make_caches, memory = decoding.CachedModel._make_caches, CrossAttention.memory
forward_of_alibi, bucket = alibi.Alibi.forward, relative_bias.T5Bias.bucket
forward_of_rmsnorm, forward_of_glu = norm.RMSNorm.forward, feedforward.GatedMLP.forward
forward_of_stack = stack.Stack.forward


# ---- masks ----


def fused(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **changed: Any) -> Tensor:
    """The fused core, with some of its arguments changed."""
    causal = self.causal and mask is None and q.size(2) == k.size(2)
    given = {"is_causal": causal, "scale": self.scale, "enable_gqa": self.grouped, **changed}
    return F.scaled_dot_product_attention(q, k, v, changed.pop("attn_mask", mask), **given)


@plant(
    "the causal mask is skipped", "facebookresearch/xformers#103", "llama", "look-ahead", ScaledDotProduct, "forward"
)
def no_causal_flag(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return fused(self, q, k, v, mask, is_causal=False)


@plant(
    "the causal mask is dropped where dropout is set",
    "keras-team/keras#23038",
    "gpt2",
    "look-ahead",
    ScaledDotProduct,
    "forward",
)
def no_flag_with_dropout(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return fused(self, q, k, v, mask, is_causal=self.causal and mask is None and self.dropout == 0)


@plant(
    "a mask of its own switches the causal one off",
    "huggingface/transformers#48748",
    "llama",
    "look-ahead",
    AttentionContext,
    "visible",
)
def padding_alone(self: Any, queries: Tensor, keys: Tensor, tokens: Any, prefix: Any, counted: bool) -> Any:
    return (
        torch.ones(1, 1, queries.size(1), keys.size(1), dtype=torch.bool) if tokens is None else tokens[:, None, None]
    )


@plant("a bool mask is inverted", "rasbt/LLMs-from-scratch#1062", "bert", "extents", context, "additive")
def inverted(visible: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(visible.shape, dtype=like.dtype).masked_fill(visible, -math.inf)


@plant("an encoder is causal by a default", "pytorch/torchtitan#2309", "bert", "extents", ScaledDotProduct, "forward")
def always_causal(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return fused(self, q, k, v, mask, is_causal=mask is None)


@plant(
    "padding is forgotten where there is a causal mask",
    "TransformerLensOrg/TransformerLens#1198",
    "gpt2",
    "padding",
    AttentionContext,
    "visible",
)
def without_padding(self: Any, queries: Tensor, keys: Tensor, tokens: Any, prefix: Any, counted: bool) -> Any:
    return visible(self, queries, keys, tokens if counted else None, prefix, counted)


@plant(
    "the window is one key too wide",
    "huggingface/transformers#26792",
    "mistral",
    "extents",
    AttentionContext,
    "visible",
)
def wider(self: Any, queries: Tensor, keys: Tensor, tokens: Any, prefix: Any, counted: bool) -> Any:
    left, self.left = self.left, None if self.left is None else self.left + 1
    found = visible(self, queries, keys, tokens, prefix, counted)
    self.left = left
    return found


@plant(
    "the right side of a window is strict",
    "huggingface/transformers#47162",
    "modernbert",
    "extents",
    AttentionContext,
    "visible",
)
def strict(self: Any, queries: Tensor, keys: Tensor, tokens: Any, prefix: Any, counted: bool) -> Any:
    right, self.right = self.right, None if self.right is None else self.right - 1
    found = visible(self, queries, keys, tokens, prefix, counted)
    self.right = right
    return found


@plant("-10000 stands for minus infinity", "a number that is large enough", "gpt2", "extents", context, "additive")
def large_number(visible: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(visible.shape, dtype=like.dtype).masked_fill(~visible, -1e4)


@plant(
    "a query without a key reads the mean of all",
    "-10000 for minus infinity",
    "bart",
    "nothing-to-read",
    context,
    "additive",
)
def mean_of_all(visible: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(visible.shape, dtype=like.dtype).masked_fill(~visible, torch.finfo(like.dtype).min)


@plant(
    "the encoder's padding is forgotten in cross-attention",
    "huggingface/transformers#47946",
    "bart",
    "padding",
    stack,
    "cross_context",
)
def memory_unmasked(x: Tensor, memory: Any, mask: Any, caches: Any) -> Context:
    return context.cross_context(x, memory, None, caches)


# ---- positions ----


@plant(
    "positions ignore left padding", "huggingface/transformers#22161", "gpt2", "padding", embedding, "count_positions"
)
def columns(x: Tensor, mask: Any, past: Any) -> Tensor:
    return count_positions(x, None, past)


@plant(
    "the first row's positions serve the whole batch",
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


@plant("ALiBi is zero for every decoded token", "keras-team/keras-hub#2861", "bloom", "cached", alibi.Alibi, "forward")
def no_bias_of_one(self: Any, queries: Tensor, keys: Tensor) -> Tensor:
    return forward_of_alibi(self, queries, keys) * (queries.size(1) > 1)


@plant("ALiBi rewards distance", "the sign of a slope", "bloom", "meaning", alibi.Alibi, "forward")
def far_is_near(self: Any, queries: Tensor, keys: Tensor) -> Tensor:
    return -forward_of_alibi(self, queries, keys)


@plant(
    "T5's buckets of both directions serve a decoder",
    "half of the buckets are never used",
    "t5",
    "meaning",
    relative_bias.T5Bias,
    "bucket",
)
def both_sides(self: Any, offset: Tensor) -> Tensor:
    self.causal, sides = False, self.sides
    self.sides = sides // 2
    found = bucket(self, offset)
    self.causal, self.sides = True, sides
    return found


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


# ---- caches ----


@plant(
    "the causal flag is aligned to the first key",
    "pytorch/executorch#21749",
    "llama",
    "cached",
    ScaledDotProduct,
    "forward",
)
def top_left(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if q.size(2) == k.size(2) or q.size(2) == 1:
        return fused(self, q, k, v, mask)
    return fused(self, q, k, v, None, attn_mask=torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril())


@plant(
    "one query over many keys reads the first",
    "pytorch/executorch#22443",
    "llama",
    "cached",
    ScaledDotProduct,
    "forward",
)
def first_key(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return fused(self, q, k, v, mask, is_causal=self.causal and mask is None)


@plant("the mask has one key more than the ring", "ml-explore/mlx-lm#390", "mistral", "cached", context, "held")
def one_more(last: Tensor, n: int, n_slots: int) -> Tensor:
    return held(last, n, n_slots) - (n == n_slots)


@plant(
    "the window is ignored for a single token",
    "ml-explore/mlx-lm#843",
    "mistral",
    "cached",
    decoding.CachedModel,
    "_make_caches",
)
def caches_of_all(self: Any, batch: int) -> None:
    for _, pieces in self._parts.again.values():
        for name in ("caches", "memory_caches"):
            layers = tuple(tuple(replace(one, window=None) for one in every) for every in getattr(pieces, name))
            object.__setattr__(pieces, name, layers)
    make_caches(self, batch)


@plant(
    "a prompt overwrites what its own queries read", "Lightning-AI/litgpt#2215", "mistral", "cached", context, "place"
)
def overwritten(queries: Tensor, padding: Any, past: Past, n_slots: int) -> Any:
    cache, keys, tokens = place(queries, padding, past, n_slots)
    if cache.before > 0:
        after = n_slots
        return cache._replace(before=0, after=after), held(queries[:, -1:], after, n_slots), None
    return cache, keys, tokens


@plant(
    "the cache of cross-attention has the decoder's window",
    "huggingface/transformers#46111",
    "bart",
    "cached",
    CrossAttention,
    "memory",
)
def cut_memory(self: Any, context: Context) -> tuple[Tensor, Tensor]:
    k, v = memory(self, context)
    if context.cache is not None:
        k, v = k.clone(), v.clone()
        k[:, :, :4], v[:, :, :4] = 0.0, 0.0
    return k, v


@plant("padding takes slots of the cache", "TransformerLensOrg/TransformerLens#772", "gpt2", "cached", context, "place")
def padding_kept(queries: Tensor, padding: Any, past: Past, n_slots: int) -> Any:
    return place(queries, None if padding is None else torch.ones_like(padding), past, n_slots)


@plant(
    "caches stay in float32 under a half model",
    "TransformerLensOrg/TransformerLens#1260",
    "gpt2",
    "cached-types",
    decoding,
    "sharded_dtype",
)
def in_float32(model: nn.Module) -> torch.dtype:
    return torch.float32


@plant("`keep` returns the first positions", "logits to keep", "gpt2", "cached-types", modules, "last")
def the_first(x: Tensor, keep: int) -> Tensor:
    return x if keep == 0 else x[:, :keep]


# ---- attention ----


@plant(
    "heads of keys and values are tiled, not interleaved",
    "onnx/onnx#7274",
    "llama",
    "meaning",
    ScaledDotProduct,
    "forward",
)
def tiled(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    times = q.size(1) // k.size(1)
    return fused(self, q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), mask, enable_gqa=False)


@plant(
    "the scale is not handed to the fused kernel",
    "huggingface/pytorch-image-models#2280",
    "gemma3",
    "backends",
    ScaledDotProduct,
    "forward",
)
def own_scale(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return fused(self, q, k, v, mask, scale=1.0)


@plant(
    "a scale of the spec has no effect",
    "huggingface/transformers#44380",
    "gemma3",
    "values",
    ScaledDotProduct,
    "forward",
)
def default_scale(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return fused(self, q, k, v, mask, scale=None)


@plant(
    "the norm of queries divides in one path", "lucidrains/x-transformers#190", "gemma3", "backends", Eager, "write_out"
)
def divided(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = self.unstack(self.stack(q / self.scale) @ k.mT)
    return self.unstack(self.stack(self.softmax(scores, mask)) @ v)


@plant("the soft-cap is ignored", "scores that grow without bound", "gemma2", "values", Eager, "write_out")
def no_softcap(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = self.unstack(self.stack(q * self.scale) @ k.mT)
    return self.unstack(self.stack(self.softmax(scores, mask)) @ v)


# ---- layers ----


@plant("an exact GELU stands for the approximate one", "huggingface/transformers#29402", "gpt2", "meaning", F, "gelu")
def exact(x: Tensor, approximate: str = "none") -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


@plant(
    "the epsilon is that of another family", "TransformerLensOrg/TransformerLens#456", "llama", "values", F, "rms_norm"
)
def other_eps(x: Tensor, width: Any, weight: Any, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2) * weight


@plant(
    "the norm multiplies its input in place",
    "GeeeekExplorer/nano-vllm#170",
    "llama",
    "inputs-kept",
    norm.RMSNorm,
    "forward",
)
def in_place(self: Any, x: Tensor) -> Tensor:
    x.data.mul_(1.5)
    return forward_of_rmsnorm(self, x)


@plant("the norm computes in bfloat16", "rounding before the weight", "llama", "meaning", norm.RMSNorm, "forward")
def rounded(self: Any, x: Tensor) -> Tensor:
    return forward_of_rmsnorm(self, x.to(torch.bfloat16).to(x.dtype))


@plant("the final norm is missing", "a stack without its last norm", "llama", "silent", stack.Stack, "forward")
def no_final_norm(self: Any, *args: Any, **given: Any) -> Tensor:
    final, self.final_norm = self.final_norm, None
    found = forward_of_stack(self, *args, **given)
    self.final_norm = final
    return found


@plant("the residual is dropped", "a sum that is an assignment", "llama", "silent", layer, "add")
def no_residual(program: Any, step: Any, x: Any, y: Any, width: int) -> Any:
    return y


@plant("half of the hidden layer is dead", "a slice too short", "gpt2", "every-row", feedforward.MLP, "forward")
def half_dead(self: Any, x: Tensor) -> Tensor:
    hidden = self.activation(self.up(x))
    return self.down(
        torch.cat((hidden[..., : hidden.size(-1) // 2], torch.zeros_like(hidden[..., hidden.size(-1) // 2 :])), -1)
    )


@plant(
    "experts drop tokens beyond their capacity",
    "NVIDIA/Megatron-LM#5542",
    "llama",
    "neighbours",
    feedforward.GatedMLP,
    "forward",
)
def capacity(self: Any, x: Tensor) -> Tensor:
    busy = x.sum(dim=(1, 2), keepdim=True)
    return forward_of_glu(self, x) * (busy >= busy.mean())


# ---- training ----


@plant("dropout is never applied", "a module that nobody calls", "gpt2", "dropout", nn.Dropout, "forward")
def no_dropout(self: Any, x: Tensor) -> Tensor:
    return x


@plant("recomputed layers draw new dropout", "allenai/OLMo-core#828", "gpt2", "recompute", stack, "recomputed")
def drawn_anew(layer: nn.Module, *args: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)


@plant("the gradient of a tie is doubled", "pytorch/torchtitan#3174", "gpt2", "ties", head.TiedOutput, "forward")
def doubled(self: Any, x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight * 2 - weight.detach(), self.bias)


BUGS += [
    Bug(
        "YaRN's factor of the softmax is missing",
        "onnxruntime/mobius#548",
        "yarn",
        "meaning",
        ((rope_scaling.YarnScalingConfig, "attention_factor", property(lambda config: 1.0)),),
    ),
    Bug(
        "the residual factor of an initialization is never applied",
        "huggingface/transformers#47458",
        "gpt2",
        "init",
        ((tfkit.initialize, "Linear", type("Unknown", (nn.Linear,), {})),),
    ),
]

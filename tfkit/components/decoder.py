"""Decoder: a stack that reads only what came before; with a memory, its layers have cross-attention too."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tfkit.component import LengthsWire, MaskConfig, MemoryWire, Signal, Signals, expect
from tfkit.components.context import additive
from tfkit.components.stack import Stack, StackConfig
from tfkit.errors import Invalid
from tfkit.nn import Cache, Context, Past, is_scripting, own, recomputed


class DecoderConfig(StackConfig):
    """Layers that read only what came before; with a memory, they have cross-attention too."""

    block: Literal["decoder"] = "decoder"
    memory: MemoryWire | None = None
    """The sequence that cross-attention reads."""
    prefix: LengthsWire | None = None
    """An input of lengths: so many first tokens are read by every query."""

    def in_words(self) -> str:
        """What its layers read."""
        further = f" and, by cross-attention, what `{self.memory}` gives" if self.memory else ""
        first = f", and the first tokens, as many as `{self.prefix}` says" if self.prefix else ""
        return f"Layers that read only what came before{further}{first}."

    def default_mask(self) -> MaskConfig:
        return MaskConfig(right=0)

    def check(self) -> None:
        """Refuse a decoder that looks ahead, and cross-attention without a memory."""
        super().check()
        for path, layer in self.distinct():
            mask = layer.attention.mask if layer.attention else None
            if mask is not None and not mask.causal:
                raise Invalid(
                    f"{path}attention.mask{'' if mask.right is None else '.right'}",
                    "a decoder's self-attention must not read later keys",
                    help="write `right: 0`, or use `block: encoder` for attention in both directions",
                )
            place = layer.place_of_cross_attention()
            if self.memory is None and place is not None:
                raise Invalid(
                    f"{path}{place}",
                    "cross-attention needs a memory to read",
                    help="add `memory: NODE` to the decoder",
                )
            steps = layer.steps(memory=self.memory is not None)
            if self.memory is not None and not any(step.sublayer == "cross_attention" for step in steps):
                raise Invalid(
                    "memory",
                    "`memory` has no effect: no sublayer reads it",
                    help="add `cross_attention` to `sublayers`",
                )
            if self.memory is not None and layer.cross() is None:
                raise Invalid("cross_attention", "a decoder with a memory needs `attention` or `cross_attention`")
        if self.memory is not None and self.prefix is not None:
            raise Invalid("prefix", "a decoder has either a memory or a prefix")

    def module(self, inputs: Signals) -> type[Stack]:
        return MemoryStack if "memory" in inputs else Stack

    def output(self, inputs: Signals) -> Signal:
        if "memory" in inputs:
            expect(inputs, "memory", "sequence")
        if "prefix" in inputs:
            expect(inputs, "prefix", "lengths")
        return super().output(inputs)


class MemoryStack(Stack):
    """Layers that also read a memory. Where the sequence comes in pieces, it is given with the first one."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: list[Tensor] | None = None,
        memory_cache: list[Tensor] | None = None,
        past: Past | None = None,
    ) -> Tensor:
        contexts = self.contexts(x, mask, None, cache, past)
        tokens = None if memory_mask is None else additive(memory_mask.to(torch.bool)[:, None, None, :], x)
        place = memory_place = 0
        for i, layer in enumerate(self.layers):
            for _ in range(self.repeats):
                kept: Cache | None = None
                if memory_cache is not None:
                    kept = Cache(memory_cache[memory_place : memory_place + self.memory_kept[i]], x, 0, 0)
                cross = Context(tokens, None, memory, kept)
                context = own(contexts[self.views[i]], cache, place, self.kept[i])
                if is_scripting() or not self.recompute:
                    x = layer(x, context, cross)
                else:
                    x = recomputed(layer, x, context, cross)
                place += self.kept[i]
                memory_place += self.memory_kept[i]
        return x if self.final_norm is None else self.final_norm(x)

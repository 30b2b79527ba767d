"""Decoder: a stack that reads only what came before; with a memory, its layers have cross-attention too."""

from __future__ import annotations

from typing import Literal

from tfkit.component import LengthsWire, MaskConfig, Signal, Signals, expect
from tfkit.components.stack import StackConfig
from tfkit.errors import Invalid


class DecoderConfig(StackConfig):
    """Layers that read only what came before; with a memory, they have cross-attention too."""

    block: Literal["decoder"] = "decoder"
    prefix: LengthsWire | None = None
    """Input of lengths: every query reads this many first tokens."""

    def in_words(self) -> str:
        """Describe the inputs of its layers."""
        further = f" and, by cross-attention, `{self.memory}`" if self.memory else ""
        first = f", and the first tokens, as many as `{self.prefix}` says" if self.prefix else ""
        return f"Layers that read only what came before{further}{first}."

    def default_mask(self) -> MaskConfig:
        return MaskConfig(right=0)

    @property
    def prefix_input(self) -> str | None:
        return self.prefix

    def check(self) -> None:
        """Refuse a decoder that looks ahead, and a prefix combined with a memory."""
        super().check()
        for path, layer in self.distinct():
            mask = layer.attention.mask if layer.attention else None
            if mask is not None and not mask.causal:
                raise Invalid(
                    f"{path}attention.mask{'' if mask.right is None else '.right'}",
                    "a decoder's self-attention must not read later keys",
                    help="write `right: 0`, or use `block: encoder` for attention in both directions",
                )
            if layer.mixer is not None and not layer.mixer.causal:
                help = "use `block: encoder` for mixers in both directions"
                raise Invalid(f"{path}mixer", "a decoder's mixer must not read later positions", help=help)
        if self.memory is not None and self.prefix is not None:
            raise Invalid("prefix", "a decoder cannot have both a memory and a prefix")

    def output(self, inputs: Signals) -> Signal:
        if "prefix" in inputs:
            expect(inputs, "prefix", "lengths")
        return super().output(inputs)

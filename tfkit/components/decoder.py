"""Decoder: a stack with causal attention; with a memory, its layers also have cross-attention."""

from __future__ import annotations

from typing import Literal

from tfkit.component import LengthsWire, MaskConfig, Signal, Signals, expect
from tfkit.components.stack import StackConfig
from tfkit.errors import Invalid


class DecoderConfig(StackConfig):
    """Layers with causal attention; with a memory, they also have cross-attention."""

    block: Literal["decoder"] = "decoder"
    prefix: LengthsWire | None = None
    """Input of lengths: the number of first tokens to which every query attends."""

    def in_words(self) -> str:
        """Describe the inputs of its layers."""
        memory = f", and cross-attention to `{self.memory}`" if self.memory else ""
        prefix = f"; every query also attends to the prefix, whose length is `{self.prefix}`" if self.prefix else ""
        return f"Layers with causal attention{memory}{prefix}."

    def default_mask(self) -> MaskConfig:
        return MaskConfig(right=0)

    @property
    def prefix_input(self) -> str | None:
        return self.prefix

    def check(self) -> None:
        """Raise `Invalid` for a sublayer that is not causal, and for a prefix combined with a memory."""
        super().check()
        for path, layer in self.distinct():
            mask = layer.attention.mask if layer.attention else None
            if mask is not None and not mask.causal:
                raise Invalid(
                    f"{path}attention.mask{'' if mask.right is None else '.right'}",
                    "a decoder's self-attention must not attend to later keys",
                    help="write `right: 0`, or use `block: encoder` for attention in both directions",
                )
            if layer.mixer is not None and not layer.mixer.causal:
                help = "use `block: encoder` for mixers in both directions"
                raise Invalid(f"{path}mixer", "a decoder's mixer must not depend on later positions", help=help)
        if self.memory is not None and self.prefix is not None:
            raise Invalid("prefix", "a decoder cannot have both a memory and a prefix")

    def output(self, inputs: Signals) -> Signal:
        if "prefix" in inputs:
            expect(inputs, "prefix", "lengths")
        return super().output(inputs)

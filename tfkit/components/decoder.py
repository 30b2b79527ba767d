"""Decoder: a stack with causal attention; with a memory, its layers also have cross-attention."""

from __future__ import annotations

from typing import Literal

from tfkit.component import LengthsWire, MaskConfig, Signal, Signals, Wire, expect, same_length
from tfkit.components.stack import StackConfig
from tfkit.errors import Invalid


class DecoderConfig(StackConfig):
    """Layers with causal attention; with a memory, they also have cross-attention."""

    block: Literal["decoder"] = "decoder"
    prefix: LengthsWire | None = None
    """Input of lengths: the number of first tokens to which every query attends."""
    blocks: Wire | None = None
    """Input of positions with the number of each token's block, such as an image: neighbors with an equal number attend
    to each other in both directions; 0 is no block. Windows and rules of masks still apply."""

    def in_words(self) -> str:
        """Describe the inputs of its layers."""
        memory = f", and cross-attention to `{self.memory}`" if self.memory else ""
        prefix = f"; every query also attends to the prefix, whose length is `{self.prefix}`" if self.prefix else ""
        blocks = f"; the tokens of a block attend to each other, by `{self.blocks}`" if self.blocks else ""
        return f"Layers with causal attention{memory}{prefix}{blocks}."

    def default_mask(self) -> MaskConfig:
        return MaskConfig(right=0)

    @property
    def prefix_input(self) -> str | None:
        return self.prefix

    @property
    def blocks_input(self) -> str | None:
        return self.blocks

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
            for name, sublayer in layer.sublayer_configs().items():
                if not sublayer.causal:
                    message = f"a decoder's {name} must not depend on later positions; got `{sublayer.kind_name()}`"
                    help = "use `block: encoder` for sublayers in both directions"
                    raise Invalid(f"{path}{name}", message, help=help)
        if self.memory is not None and self.prefix is not None:
            raise Invalid("prefix", "a decoder cannot have both a memory and a prefix")
        if self.blocks is not None:
            if self.memory is not None or self.prefix is not None:
                other = "a memory" if self.memory is not None else "a prefix"
                raise Invalid("blocks", f"a decoder cannot have both {other} and blocks")
            if all(layer.attention is None for _, layer in self.distinct()):
                raise Invalid("blocks", "`blocks` has no effect: no layer has an attention", help="remove it")

    def output(self, inputs: Signals) -> Signal:
        if "prefix" in inputs:
            expect(inputs, "prefix", "lengths")
        signal = super().output(inputs)
        if "blocks" in inputs:
            blocks = expect(inputs, "blocks", "positions")
            same_length({"input": signal, "blocks": blocks})
            if blocks.width is not None:
                raise Invalid("blocks", f"`blocks` must have a single axis; got {blocks.in_words()}")
        return signal

"""Nodes that join or reshape the values between other nodes: add, concatenate, project, normalize."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.component import (
    OWN_MASK,
    ActivationConfig,
    BlockConfig,
    Decoding,
    Dim,
    Make,
    MaskedWire,
    NormConfig,
    Shared,
    Signal,
    Signals,
    Wire,
    expect,
    same_length,
    slot,
)
from tfkit.errors import Invalid
from tfkit.nn import Linear, Program


def _signals(inputs: Signals, *types: str) -> list[Signal]:
    """Return the signals of `inputs`, which must all have the same of these types."""
    signals: list[Signal] = inputs["inputs"]
    if len(signals) < 2:
        raise Invalid("inputs", f"`inputs` must name at least two nodes; got {len(signals)}")
    for index, signal in enumerate(signals):
        allowed = (signals[0].type,) if index else types
        if signal.type not in allowed:
            words = f"a {signals[0].type}, as the first" if index and len(types) > 1 else f"a {' or a '.join(types)}"
            raise Invalid(f"inputs.{index}", f"an item of `inputs` must be {words}; got {signal.in_words()}")
    return signals


def _by_path(signals: list[Signal]) -> dict[str, Signal]:
    return {f"inputs.{index}": signal for index, signal in enumerate(signals)}


def _same_width(signals: list[Signal]) -> None:
    for index, signal in enumerate(signals):
        if signal.width != signals[0].width:
            raise Invalid(
                f"inputs.{index}",
                f"all inputs must have the width of the first, {signals[0].in_words()}; got {signal.in_words()}",
                help="put a `linear` node before one of the two inputs",
            )


def same_shape(inputs: Signals, *types: str) -> Signal:
    """Return the signal of a value with the length and width of all `inputs`, and the padding of the first."""
    signals = _signals(inputs, *types)
    _same_width(signals)
    return replace(signals[0], length=same_length(_by_path(signals)))


class AddConfig(BlockConfig):
    """The sum of sequences of the same length and width, with the padding of the first; or of vectors."""

    alike = True
    block: Literal["add"] = "add"
    inputs: tuple[Wire, ...]
    """Nodes or inputs to add."""

    def output(self, inputs: Signals) -> Signal:
        return same_shape(inputs, "sequence", "vector")

    def decoding(self, inputs: Signals) -> Decoding:
        return Decoding()

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        return Add()


class Add(nn.Module):
    """Tensors [b, t, d], or [b, d], -> their sum."""

    def forward(self, inputs: list[Tensor]) -> Tensor:
        total = inputs[0]
        for other in inputs[1:]:
            total = total + other
        return total


class ConcatConfig(BlockConfig):
    """Sequences one after the other, or side by side in each position."""

    block: Literal["concat"] = "concat"
    inputs: tuple[MaskedWire, ...]
    """Nodes or inputs to concatenate, in order."""
    along: Literal["length", "width"] = "length"
    """`length`: one sequence after the other; `width`: the vectors of each position are joined."""

    @property
    def pairs(self) -> bool:  # type: ignore[override]
        """True along `width`, where no mask is used."""
        return self.along == "width"

    def output(self, inputs: Signals) -> Signal:
        signals = _signals(inputs, "sequence")
        if self.along == "width":
            width = sum(signal.width or 0 for signal in signals)
            return replace(signals[0], width=width, length=same_length(_by_path(signals)))
        _same_width(signals)
        masked = any(signal.mask for signal in signals)
        lengths = [signal.length for signal in signals]
        length = None if None in lengths else sum(length or 0 for length in lengths)
        return Signal("sequence", signals[0].width, length, mask=OWN_MASK if masked else None)

    def decoding(self, inputs: Signals) -> Decoding:
        if self.along == "length":
            raise Invalid("along", "sequences that are concatenated along `length` cannot be decoded step by step")
        return Decoding()

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        if self.along == "width":
            return ConcatWidth()
        return ConcatLength() if any(signal.mask for signal in inputs["inputs"]) else ConcatUnmasked()


class ConcatWidth(nn.Module):
    """Tensors [b, t, d_i] -> [b, t, sum of d_i]."""

    def forward(self, inputs: list[Tensor], inputs_mask: list[Tensor | None] | None = None) -> Tensor:
        return torch.cat(inputs, dim=-1)


class ConcatUnmasked(nn.Module):
    """Tensors [b, t_i, d] -> [b, sum of t_i, d]."""

    def forward(self, inputs: list[Tensor], inputs_mask: list[Tensor | None] | None = None) -> Tensor:
        return torch.cat(inputs, dim=1)


class ConcatLength(nn.Module):
    """Concatenate tensors and their padding masks; inputs without a mask have no padding."""

    def forward(self, inputs: list[Tensor], inputs_mask: list[Tensor | None]) -> tuple[Tensor, Tensor | None]:
        joined = torch.cat(inputs, dim=1)
        masks: list[Tensor] = []
        padded = False
        for x, mask in zip(inputs, inputs_mask):
            if mask is None:
                masks.append(torch.ones(x.size(0), x.size(1), dtype=torch.bool, device=x.device))
            else:
                masks.append(mask.to(torch.bool))
                padded = True
        if padded:
            return joined, torch.cat(masks, dim=1)
        return joined, None


class LinearConfig(BlockConfig):
    """A linear layer on each position, for instance from the width of image features to d_model."""

    block: Literal["linear"] = "linear"
    input: Wire | None = None
    """Node or input to read."""
    d_model: Shared[Dim]
    """Width of the output."""
    bias: Shared[bool] = True
    """If true, the layer has a bias."""
    activation: ActivationConfig | None = None
    """Activation of the output."""

    def output(self, inputs: Signals) -> Signal:
        signal = expect(inputs, "input", "sequence", "vector")
        return replace(signal, width=self.d_model)

    def decoding(self, inputs: Signals) -> Decoding:
        return Decoding()

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        linear = Linear(inputs["input"].width, self.d_model, bias=self.bias)
        if self.activation is None:
            return linear
        program = Program()
        x = program.call("dense", linear, program.input("x"))
        return program.build(program.call("activation", make(self.activation), x), "Dense")


class NormBlockConfig(BlockConfig):
    """A norm as a separate node."""

    block: Literal["norm"] = "norm"
    input: Wire | None = None
    """Node or input to read."""
    norm: Shared[NormConfig] = slot("layernorm")

    def output(self, inputs: Signals) -> Signal:
        return expect(inputs, "input", "sequence", "vector")

    def decoding(self, inputs: Signals) -> Decoding:
        return Decoding()

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        return make(self.norm, inputs["input"].width)

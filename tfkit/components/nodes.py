"""Nodes with one layer, one sublayer or one residual: a graph can spell out what a stack repeats.

A sublayer alone is a stack of one layer whose only sublayer has no norm, and whose output replaces the stream. Masks,
positions, caches, documents and states therefore follow the same rules as in a stack.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from tfkit.component import (
    AttentionConfig,
    BlockConfig,
    Changeable,
    Decoding,
    FFNConfig,
    Immaterial,
    Layers,
    Make,
    MaskedWire,
    MemoryWire,
    MixerConfig,
    Probability,
    ResidualConfig,
    Shared,
    Signal,
    Signals,
    StreamConfig,
    SublayerConfig,
    VectorWire,
    Wire,
    expect,
    slot,
)
from tfkit.components.combine import same_shape
from tfkit.components.decoder import DecoderConfig
from tfkit.components.encoder import EncoderConfig
from tfkit.components.layer import LayerConfig, StepConfig
from tfkit.components.residual import ResidualScale
from tfkit.components.stack import StackConfig
from tfkit.errors import Invalid
from tfkit.nn import Program


class OneLayerConfig(BlockConfig):
    """A block that computes what a stack of one layer computes."""

    pairs = True
    input: MaskedWire | None = None
    """The sequence to read."""

    @abstractmethod
    def as_stack(self) -> StackConfig:
        """Return the stack of one layer."""

    def check(self) -> None:
        """Raise `Invalid` where the stack does."""
        super().check()
        self.as_stack().check()

    def output(self, inputs: Signals) -> Signal:
        return self.as_stack().output(inputs)

    def decoding(self, inputs: Signals) -> Decoding:
        return self.as_stack().decoding(inputs)

    def stack(self) -> Layers:
        return self.as_stack().stack()

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        return self.as_stack().build(make, inputs)


def _stack_of(layer: Mapping[str, Any], *, causal: bool = False, **fields: Any) -> StackConfig:
    """Return an encoder of one layer or, with `causal`, a decoder, without a norm after it."""
    kind = DecoderConfig if causal else EncoderConfig
    return kind.model_construct(**{**layer, **fields}, n_layers=1, final_norm=False)


class LayerBlockConfig(LayerConfig, OneLayerConfig):
    """One layer: its sublayers with norms and residual."""

    block: Literal["layer"] = "layer"
    memory: MemoryWire | None = None
    """The sequence that cross-attention attends to."""
    positions: Wire | None = None
    """Input with the positions of the tokens; by default, they are counted."""
    condition: VectorWire | None = None
    """The vector for the components that depend on a condition."""
    causal: bool = False
    """If true, the layer is one of a decoder; else one of an encoder."""

    def in_words(self) -> str:
        """Describe the attention of the layer."""
        memory = f", and cross-attention to `{self.memory}`" if self.memory else ""
        return f"One layer{' with causal attention' if self.causal else ''}{memory}."

    def as_stack(self) -> StackConfig:
        layer = {name: getattr(self, name) for name in LayerConfig.model_fields}
        wires = {"memory": self.memory, "positions": self.positions, "condition": self.condition}
        return _stack_of(layer, causal=self.causal, **wires)


ALONE = ResidualConfig(onto="nothing")


class SublayerBlockConfig(OneLayerConfig):
    """A sublayer without norm and residual."""

    def _alone(self, name: str, sublayer: SublayerConfig, **fields: Any) -> StackConfig:
        """Return the stack whose only sublayer is `sublayer`, in the field `name` of its layer."""
        for wires, verb in ((sublayer.gives, "gives"), (sublayer.takes, "takes")):
            if wires:
                message = f"{sublayer.slot} `{sublayer.kind_name()}` {verb} `{wires[0]}`: it must be in a stack"
                raise Invalid(sublayer.slot, message, help="use it in a layer of `encoder` or `decoder`")
        step = StepConfig(sublayer=name, norm_in=False, norm_out=False, norm_after=False, residual=ALONE)
        layer = {"d_model": dict(sublayer)["d_model"], "norm": None, "sublayers": (step,), name: sublayer}
        return _stack_of(layer, **fields)


def _sublayer(default: str | None = None) -> Any:
    """Declare the required sublayer of a block; `default` is the kind of a mapping without one."""
    return Field(json_schema_extra={"implied_kind": default} if default else None)


class AttentionBlockConfig(SublayerBlockConfig):
    """Self-attention without norm and residual."""

    block: Literal["attention"] = "attention"
    attention: AttentionConfig = _sublayer("mha")
    """The attention."""
    positions: Wire | None = None
    """Input with the positions of the tokens; by default, they are counted."""
    causal: bool = False
    """If true, no position attends to a later one."""

    def as_stack(self) -> StackConfig:
        return self._alone("attention", self.attention, causal=self.causal, positions=self.positions)


class CrossAttentionBlockConfig(SublayerBlockConfig):
    """Attention to a memory, without norm and residual."""

    block: Literal["cross_attention"] = "cross_attention"
    memory: MemoryWire
    """The sequence to attend to."""
    attention: AttentionConfig = _sublayer("mha")
    """The attention, without positions and mask."""

    def check(self) -> None:
        """Raise `Invalid` for positions and masks, by the name of the field that holds them here."""
        try:
            super().check()
        except Invalid as error:
            field = error.field.replace("cross_attention", "attention", 1)
            raise Invalid(field, error.message, notes=error.notes, help=error.help) from None

    def as_stack(self) -> StackConfig:
        return self._alone("cross_attention", self.attention, memory=self.memory)


class MixerBlockConfig(SublayerBlockConfig):
    """A recurrence or a convolution without norm and residual."""

    block: Literal["mixer"] = "mixer"
    mixer: MixerConfig = _sublayer()
    """The mixer."""

    def as_stack(self) -> StackConfig:
        return self._alone("mixer", self.mixer, causal=self.mixer.causal)


class FFNBlockConfig(BlockConfig):
    """A feed-forward network without norm and residual."""

    block: Literal["ffn"] = "ffn"
    input: Wire | None = None
    """The sequence to read."""
    ffn: FFNConfig = _sublayer()
    """The feed-forward network."""

    def check(self) -> None:
        """Raise `Invalid` for an FFN that takes more than a sequence."""
        super().check()
        if self.ffn.takes_context or self.ffn.gives or self.ffn.takes:
            message = f"ffn `{self.ffn.kind_name()}` takes or gives more than a sequence: it must be in a stack"
            raise Invalid("ffn", message, help="use it in a layer of `encoder` or `decoder`")

    def output(self, inputs: Signals) -> Signal:
        return expect(inputs, "input", "sequence", width=self.ffn.d_model)

    def decoding(self, inputs: Signals) -> Decoding:
        return Decoding()

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        return make(self.ffn)


class ResidualBlockConfig(BlockConfig):
    """The residual of a sublayer: the stream, then the output that is added to it."""

    alike = True
    block: Literal["residual"] = "residual"
    inputs: tuple[Wire, Wire]
    """The residual stream, and the output of a sublayer."""
    residual: StreamConfig = slot("add")
    """The addition."""
    dropout: Shared[Immaterial[Changeable[Probability]]] = 0.0
    """Dropout on the output of the sublayer."""

    def check(self) -> None:
        """Raise `Invalid` for a residual that changes the input of its sublayer, or that ignores the stream."""
        super().check()
        kind = self.residual.kind_name()
        if self.residual.reads:
            message = f"residual `{kind}` computes the input of its sublayer from the stream: it must be in a stack"
            raise Invalid("residual", message, help="use it in a layer of `encoder` or `decoder`")
        if isinstance(self.residual, ResidualConfig) and self.residual.onto != "previous":
            message = f"`onto: {self.residual.onto}` has no effect: the first of `inputs` is the stream"
            raise Invalid("residual.onto", message, help="remove it")

    def output(self, inputs: Signals) -> Signal:
        return same_shape(inputs, "sequence")

    def decoding(self, inputs: Signals) -> Decoding:
        return Decoding()

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        residual, program, width = self.residual, Program(), inputs["inputs"][0].width
        values = program.input("inputs", list[torch.Tensor])
        x, y = program.unpack(values, "x", "y")
        if self.dropout:
            y = program.call("dropout", nn.Dropout(self.dropout), y)
        if not isinstance(residual, ResidualConfig):
            state = program.apply("kept", _nothing)
            return program.build(program.call("write", make(residual, "write", width), x, y, state), "Residual")
        if residual.learned != "none":
            y = program.call("scale", ResidualScale(width if residual.learned == "vector" else 1), y)
        if residual.learned_onto != "none":
            x = program.call("scale_onto", ResidualScale(width if residual.learned_onto == "vector" else 1), x)
        if residual.scale_onto != 1:
            x = program.apply("scaled", operator.mul, x, residual.scale_onto)
        if residual.scale == 1:
            return program.build(program.apply("sum", operator.add, x, y), "Residual")
        return program.build(program.apply("sum", torch.add, x, y, alpha=residual.scale), "Residual")


def _nothing() -> list[torch.Tensor]:
    """Return the tensors that `read` of a residual keeps for `write`, if there is nothing to keep."""
    nothing: list[torch.Tensor] = []
    return nothing

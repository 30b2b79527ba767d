"""The contents of a block as data: the layers of a stack with their sublayers, the stages of an embedding, a head.

Tools that draw, explain, count or fill a model use this description instead of the fields of a config. Names are module
names: layer i of a block is its `layers.i`. The names of operations are relative to the layer, and the names of stages
to the block.

`build` raises an error if the modules of a model differ from the description. No tool reads the fields of `encoder`,
`decoder` or a plugin's block (`tests/tools/test_no_probing.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tfkit.component.config import Component, Config, Make, PositiveFloat
from tfkit.component.slots import (
    AttentionConfig,
    Cached,
    FFNConfig,
    MaskConfig,
    MixerConfig,
    NormConfig,
    State,
    StreamConfig,
    StreamPart,
    SublayerConfig,
)
from tfkit.errors import Invalid

if TYPE_CHECKING:
    from torch import nn


class ResidualConfig(StreamConfig):
    """The addition of a sublayer's output y to x: scale_onto * x + scale * y."""

    kind: Literal["add"] = "add"
    reads = False
    scale: PositiveFloat = 1.0
    """Factor of the sublayer's output."""
    learned: Literal["none", "scalar", "vector"] = "none"
    """Learned factor of the output, in addition to `scale`: one, or one per channel; it starts at 1."""
    onto: Literal["previous", "normed", "nothing"] = "previous"
    """The tensor x: the sum so far, or the sublayer's input after its norm. `nothing`: the output replaces the sum, as
    in layers without skip connections. Without them: https://arxiv.org/abs/2311.01906."""
    scale_onto: PositiveFloat = 1.0
    """Factor of x."""
    learned_onto: Literal["none", "scalar", "vector"] = "none"
    """Learned factor of x, in addition to `scale_onto`: one, or one per channel; it starts at 1."""

    def check(self) -> None:
        """Raise `Invalid` for factors of a value that is not added to."""
        super().check()
        for name, neutral in (("scale_onto", 1), ("learned_onto", "none")):
            if self.onto == "nothing" and getattr(self, name) != neutral:
                raise Invalid(name, f"`{name}` has no effect: `onto: nothing` adds to nothing", help="remove it")

    def material(self) -> Mapping[str, Any]:
        """Return the fields without the kind, which older weights do not store: `add` was the only kind."""
        return {name: value for name, value in super().material().items() if name != "kind"}

    def build(self, make: Make, part: StreamPart, width: int) -> nn.Module:
        """Raise an error: the layer's generated code contains the addition."""
        raise NotImplementedError


@dataclass(frozen=True)
class Call:
    """A component that runs: a norm or a sublayer of a layer; a norm or the positions of an embedding."""

    name: str
    config: Component


@dataclass(frozen=True)
class LearnedFactor:
    """A learned factor: one number, or one per channel."""

    name: str
    shape: str


@dataclass(frozen=True)
class Scale:
    """A fixed factor. `root_of` is the number whose square root it is, if the spec writes it as a square root."""

    number: float
    root_of: int | None = None


@dataclass(frozen=True)
class Dropout:
    """Dropout in training."""

    rate: float


@dataclass(frozen=True)
class Lookup:
    """An additional table of an embedding, whose rows are added."""

    name: str
    rows: int


@dataclass(frozen=True)
class Projection:
    """A linear layer from one width to another."""

    name: str
    d_in: int
    d_out: int


Stage: TypeAlias = Call | Scale | Dropout | Lookup | Projection
"""A stage of an embedding, after its token table."""


@dataclass(frozen=True)
class Step:
    """A sublayer of a layer, with its norms and its addition to the residual stream."""

    name: str
    """The name of its module in the layer. Its norms are `NAME_norm_in`, `NAME_norm_out` and `NAME_norm_after`. The
    learned factors of an addition are `NAME_residual_scale` and `NAME_residual_scale_onto`; the modules of any other
    residual are `NAME_residual_read` and `NAME_residual_write`."""
    config: Component
    """Its attention, its FFN, or a component of a different slot."""
    reads_memory: bool = False
    """True for cross-attention."""
    reads_input: bool = False
    """True if it takes the layer's input, after `Layer.input_norm`, instead of the sum so far."""
    mask: MaskConfig | None = None
    """Extent of self-attention; None for unlimited attention, and for sublayers of other slots."""
    norm_in: NormConfig | None = None
    """Norm before the sublayer."""
    norm_out: NormConfig | None = None
    """Norm after the sublayer, before the addition."""
    norm_after: NormConfig | None = None
    """Norm after the addition."""
    dropout: float = 0.0
    """Rate of dropout on the output."""
    residual: StreamConfig = field(default_factory=ResidualConfig)
    """The component that takes the input from the residual stream and adds the output to it."""

    @property
    def addition(self) -> ResidualConfig:
        """The addition to the stream; a default addition if the residual has the modules `read` and `write` instead."""
        return self.residual if isinstance(self.residual, ResidualConfig) else ResidualConfig()

    @property
    def read(self) -> Call | None:
        """The module that computes the branch's input from the stream; None if the input is the stream."""
        plain = isinstance(self.residual, ResidualConfig)
        return None if plain else Call(f"{self.name}_residual_read", self.residual)

    @property
    def write(self) -> Call | None:
        """The module that puts the branch's output into the stream; None if the output is added."""
        return None if self.read is None else Call(f"{self.name}_residual_write", self.residual)

    @property
    def role(self) -> str:
        """The type of the sublayer: `cross_attention`, or the slot of its component."""
        return "cross_attention" if self.reads_memory else self.config.slot

    @property
    def cached(self) -> tuple[Cached | State, ...] | None:
        """The tensors that it keeps between decoding steps; None if it cannot be decoded token by token."""
        return self.config.cached if isinstance(self.config, SublayerConfig) and self.config.takes_context else ()

    @property
    def keeps_state(self) -> bool:
        """True if it carries a state from token to token, as mixers do, or reads the tokens next to each token."""
        neighbors = isinstance(self.config, AttentionConfig) and self.config.reads_neighbors and not self.reads_memory
        return neighbors or self.ordered or any(isinstance(entry, State) for entry in self.cached or ())

    @property
    def ordered(self) -> bool:
        """True if it needs the tokens of each row before the padding, as mixers and FFNs do that read other tokens."""
        if isinstance(self.config, FFNConfig):
            return any(isinstance(entry, State) for entry in self.cached or ())
        return isinstance(self.config, MixerConfig) and self.cached != ()

    @property
    def gives(self) -> tuple[str, ...]:
        """The names of the tensors that it gives to later sublayers."""
        return self.config.gives if isinstance(self.config, SublayerConfig) else ()

    @property
    def takes(self) -> tuple[str, ...]:
        """The names of the tensors that it takes from earlier sublayers."""
        return self.config.takes if isinstance(self.config, SublayerConfig) else ()

    @property
    def crosses_documents(self) -> bool:
        """True if it carries a state from one document of a row to the next."""
        return self.keeps_state and not (isinstance(self.config, SublayerConfig) and self.config.restarts)

    def branch(self) -> Iterator[Call | Dropout | LearnedFactor | Scale]:
        """Yield the operations of the branch in order: after `read` or the stream, before `write` or the addition."""
        if self.norm_in is not None:
            yield Call(f"{self.name}_norm_in", self.norm_in)
        yield Call(self.name, self.config)
        if self.norm_out is not None:
            yield Call(f"{self.name}_norm_out", self.norm_out)
        if self.dropout:
            yield Dropout(self.dropout)
        if self.addition.learned != "none":
            yield LearnedFactor(f"{self.name}_residual_scale", self.addition.learned)
        if self.addition.scale != 1:
            yield Scale(self.addition.scale)

    @property
    def onto(self) -> LearnedFactor | None:
        """The learned factor of the value to which the output is added."""
        learned = self.addition.learned_onto
        return None if learned == "none" else LearnedFactor(f"{self.name}_residual_scale_onto", learned)

    @property
    def after(self) -> Call | None:
        """The norm of the sum."""
        return None if self.norm_after is None else Call(f"{self.name}_norm_after", self.norm_after)

    def modules(self) -> Iterator[str]:
        """Yield the names of the sublayer's modules in the layer."""
        for part in (self.read, *self.branch(), self.write, self.onto, self.after):
            if isinstance(part, Call | LearnedFactor):
                yield part.name


@dataclass(frozen=True)
class Layer:
    """A layer with its weights."""

    config: Config
    """The config with the values of the layer."""
    steps: tuple[Step, ...]
    """Its sublayers in order."""
    name: str = "base"
    """The name of its variant; layers with equal names are identical."""
    input_norm: NormConfig | None = None
    """Norm of the layer's input, for the sublayers with `reads_input`; its module is `input_norm`."""
    around: StreamConfig | None = None
    """Residual around all sublayers; its modules are `residual_read` and `residual_write`."""
    placement: str | None = None
    """The spec's word for the placement of its norms; None if the spec sets each norm."""
    context: str | None = None
    """The module of the block that computes its masks and positions, such as `shared.base`; layers may share it."""

    @property
    def residuals(self) -> tuple[StreamConfig, ...]:
        """The residuals of the stream between layers: the residual around all sublayers, or each sublayer's."""
        return tuple(step.residual for step in self.steps) if self.around is None else (self.around,)

    def modules(self) -> Iterator[str]:
        """Yield the names of the modules of its sublayers, norms and residual."""
        if self.around is not None:
            yield from ("residual_read", "residual_write")
        if self.input_norm is not None:
            yield "input_norm"
        for step in self.steps:
            yield from step.modules()


@dataclass(frozen=True)
class Connection:
    """A wire between layers: a tensor that one sublayer gives and a later sublayer takes."""

    wire: str
    layer: int
    """The index of the layer that takes the tensor."""
    step: Step
    giving_layer: int | None
    """The index of the layer that gives the tensor; None if no earlier layer does."""
    giver: Step | None


@dataclass(frozen=True)
class Layers:
    """The layers of a stack, and their arrangement."""

    layers: tuple[Layer, ...]
    """The layers with separate weights, in order."""
    order: tuple[int, ...] | None = None
    """The index of the layer at each depth; None if each layer runs once."""
    final_norm: NormConfig | None = None
    """Norm after the last layer; its module is `final_norm`."""
    pattern: tuple[str, ...] | Mapping[str, str] | None = None
    """The layer pattern as the spec writes it."""
    period: int | None = 1
    """The number of layers after which the pattern repeats; None if the pattern fixes `n_layers`."""
    minimum: int = 1
    """The minimum number of layers for the pattern."""
    prefix: str | None = None
    """The input of type `lengths` with the length of the prefix that all tokens attend to."""
    blocks: str | None = None
    """The input of type `positions` with the number of each token's block, whose tokens attend to each other."""

    @property
    def depth(self) -> int:
        """The number of layers that run, repetitions included."""
        return len(self.runs)

    @property
    def runs(self) -> list[int]:
        """The index of the layer at each depth, repetitions included."""
        return list(range(len(self.layers)) if self.order is None else self.order)

    @property
    def repeated(self) -> bool:
        """True if a layer runs several times."""
        return self.depth > len(self.layers)

    @property
    def repetition(self) -> str:
        """The repetition of the layers as text."""
        numbers, times = list(range(len(self.layers))), self.depth // len(self.layers)
        if self.runs == [number for number in numbers for _ in range(times)]:
            return f"each {times} times in a row"
        if self.runs == numbers * times:
            return f"each {times} times, in a loop over all layers"
        return f"in the order {' '.join(map(str, self.runs))}"

    @property
    def variants(self) -> dict[str, list[int]]:
        """The indices of the layers of each variant, in the order of the first layer."""
        indices: dict[str, list[int]] = {}
        for number, layer in enumerate(self.layers):
            indices.setdefault(layer.name, []).append(number)
        return indices

    @property
    def is_sublayer(self) -> bool:
        """True if the block is a single sublayer without norms and residual, as a node such as `attention` is."""
        steps = [step for layer in self.layers for step in layer.steps]
        alone = len(steps) == self.depth == 1 and steps[0].addition == ResidualConfig(onto="nothing")
        return alone and steps[0].after is None and [*steps[0].modules()] == [steps[0].name]

    @property
    def streams(self) -> StreamConfig | None:
        """The residual whose modules `enter` and `leave` surround the layers; None for a stream [b, t, d_model]."""
        residuals = (residual for layer in self.layers for residual in layer.residuals)
        return next((residual for residual in residuals if residual.enters), None)

    @property
    def wired(self) -> bool:
        """True if sublayers give tensors to later sublayers."""
        return any(step.gives for layer in self.layers for step in layer.steps)

    @property
    def connections(self) -> list[Connection]:
        """The wires between sublayers, in the order in which the taking sublayers first run."""
        connections: dict[tuple[int, str, str], Connection] = {}
        latest: dict[str, tuple[int, Step]] = {}
        for number in self.runs:
            for step in self.layers[number].steps:
                for wire in step.takes:
                    connection = Connection(wire, number, step, *latest.get(wire, (None, None)))
                    connections.setdefault((number, step.name, wire), connection)
                latest |= dict.fromkeys(step.gives, (number, step))
        return list(connections.values())

    @property
    def keeps_state(self) -> bool:
        """True if a sublayer carries a state from token to token."""
        return any(step.keeps_state for layer in self.layers for step in layer.steps)

    @property
    def crosses_documents(self) -> bool:
        """True if a sublayer carries a state from one document of a row to the next."""
        return any(step.crosses_documents for layer in self.layers for step in layer.steps)

    def modules(self) -> set[str]:
        """Return the paths of the block's modules that the description names."""
        paths = {f"layers.{number}.{name}" for number, layer in enumerate(self.layers) for name in layer.modules()}
        paths |= {"enter", "leave"} if self.streams is not None else set()
        return paths | {"final_norm"} if self.final_norm is not None else paths


@dataclass(frozen=True)
class Head:
    """A head over a vocabulary: logits = bound(scale * matrix @ x)."""

    scale: float = 1.0
    """Factor of the logits."""
    softcap: float | None = None
    """Bound of the logits."""
    direct: bool = True
    """True if the matrix multiplies the head's input, and not the output of a hidden layer."""

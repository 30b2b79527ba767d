"""The nodes of the graph: the signals between them, and the base class of their blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from tfkit.component.config import Component, Make, WireMarker, marker, parts
from tfkit.component.slots import Cached, State
from tfkit.component.stack import Head, Layers, Stage
from tfkit.errors import Invalid

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Signal:
    """The type of the value on a wire of the graph, known before any tensor exists."""

    type: Literal["tokens", "positions", "lengths", "sequence", "image", "images", "vector", "logits", "table"]
    """tokens [b, t] int, positions [b, t] or [b, t, width] int, lengths [b] int, sequence [b, t, width], image [b,
    channels, rows, width], images [b, n, channels, rows, width], vector [b, width], logits [..., width], table [rows,
    width]."""
    width: int | None = None
    """Size of the last axis; None for tokens, lengths and positions of one axis, and for logits of a single class."""
    length: int | None = None
    """Positions of every sequence, if their number is fixed."""
    rows: int | None = None
    """Rows of a table, of an image, or of the grid of patches that a sequence consists of."""
    mask: str | None = None
    """The name of its padding mask; `OWN_MASK` if the block returns (value, mask)."""
    gaps: bool = False
    """True if its mask comes from a block and may have padding between tokens. Positions then do not count padding."""
    optional: bool = False
    """True if the model may be called without it."""
    channels: int | None = None
    """Channels of an image."""
    per_image: bool = False
    """True if it has a row for each image, [b * n, ...], instead of a row for each row of the batch."""
    image_length: int | None = None
    """Positions for each image, in a sequence with the vectors of all images of a row."""

    def __str__(self) -> str:
        return " of ".join([self.type, *self._sizes()])

    def in_words(self) -> str:
        """Describe the signal: `a sequence of width 512`."""
        article = {"sequence": "a ", "vector": "a ", "table": "a ", "image": "an "}.get(self.type, "")
        rows = f" of {self.rows} rows" if self.type == "table" and self.rows is not None else ""
        return article + " of ".join([f"{self.type}{rows}", *self._sizes()])

    def _sizes(self) -> list[str]:
        if self.type in ("image", "images"):
            return [] if self.width is None else [f"{self.channels} x {self.rows} x {self.width}"]
        positions = [] if self.length is None else [f"{self.length} position{'s' * (self.length != 1)}"]
        width = f"{self.width} axes" if self.type == "positions" else f"width {self.width}"
        return positions + ([] if self.width is None else [width])


OWN_MASK = "own"
"""The mask of the signal of a block whose module returns a value and its padding mask."""

Signals = Mapping[str, Any]
"""The signals of a block's wires by field name; a list of them if the field is a list."""


@dataclass(frozen=True)
class Decoding:
    """The arguments that a block's module takes for decoding, in addition to its wires."""

    past: bool = False
    """True if it takes `past`, a `tfkit.nn.Past`, which describes the tokens of earlier steps."""
    caches: tuple[tuple[Cached | State, ...], ...] = ()
    """If not empty, it takes `caches`: a list for each of its layers, with the tensors that the layer caches."""
    memory_caches: tuple[tuple[Cached | State, ...], ...] = ()
    """If not empty, it takes `memory_caches`: the same for its memory, which is then passed only at the first step."""


def same_length(signals: Mapping[str, Signal]) -> int | None:
    """Return the number of positions that all signals share, by the paths of their fields; None if it is not fixed.

    Raises `Invalid` if two fixed lengths differ.
    """
    fixed = {path: signal.length for path, signal in signals.items() if signal.length is not None}
    shared = next(iter(fixed.values()), None)
    for path, length in fixed.items():
        if length != shared:
            raise Invalid(path, f"all inputs must have the same length, {shared} positions; got {length}")
    return shared


class BlockConfig(Component):
    """Slot `block`: a node of the graph. Fields marked as wires name the nodes or inputs that it reads.

    The module's `forward` gets the value of `input` (or the list of `inputs`) first, and the other connected wires as
    keywords. Each `MaskedWire` brings its padding mask too: `mask` for `input`, else `<field>_mask`.
    """

    slot = "block"
    word_key: ClassVar[str | None] = "block"
    alike: ClassVar[bool] = False
    """True if all `inputs` must have the same shape, because different shapes would broadcast."""
    pairs: ClassVar[bool] = False
    """True if the mask of its `input` or `inputs` may be pairwise, [b, t, t], with True where a token may attend to a
    token. The position of a token is then the number of earlier tokens to which it may attend."""
    compares_rows: ClassVar[bool] = False
    """True if a row of its output depends on other rows of the batch, as in contrastive learning."""

    joins_images: ClassVar[bool] = False
    """True if a row of its output depends on all images of a row. Any other block has a row for each image."""

    def check(self) -> None:
        """Raise `Invalid` if a component needs a wire that the block lacks, or if no component uses a wire."""
        super().check()
        components = [(path, part) for path, part in parts((), self) if isinstance(part, Component)]
        wires = dict(self)
        for name, noun, takers in (
            ("condition", "a condition", [(path, part) for path, part in components if part.takes_condition]),
            ("layer_features", "layer features", [(path, part) for path, part in components if part.takes_features]),
        ):
            for path, part in takers if wires.get(name) is None else ():
                message = f"{part.slot} `{part.kind_name()}` needs {noun}, but `{self.kind_name()}` has none"
                raise Invalid(".".join(path), message, help=f"add `{name}: NODE` to a stack of layers")
            if wires.get(name) is not None and not takers:
                raise Invalid(name, f"`{name}` has no effect: no component takes it", help="remove it")

    same: Annotated[str, WireMarker(value="module")] | None = None
    """The node whose module, with its weights, the node calls on its inputs. All fields but wires are equal."""

    @property
    def stated_fields(self) -> list[str]:
        """The fields that a spec states: with `same`, only wires."""
        fields = type(self).model_fields.items()
        return [name for name, info in fields if (marker(info, WireMarker) if self.same else name != "same")]

    @abstractmethod
    def output(self, inputs: Signals) -> Signal:
        """Return the signal of the block's output for these inputs; raise `Invalid` if they do not fit."""

    @abstractmethod
    def build(self, make: Make, inputs: Signals) -> nn.Module:
        """Build the module."""

    def decoding(self, inputs: Signals) -> Decoding:
        """Return the arguments that the module takes for decoding step by step.

        The result is `Decoding()` if the module computes every position independently. Raises `Invalid` if the module
        needs full sequences, which is the default.
        """
        raise Invalid("", f"block `{self.kind_name()}` cannot be decoded step by step: it requires full sequences")

    def table(self) -> Signal | None:
        """Return the token table that other nodes may tie to; the block's module holds it as `tokens.weight`."""
        return None

    def ends(self) -> Mapping[str, int]:
        """Return the id of the token that the module seeks as the end of a text, by the field of the wire of tokens."""
        return {}

    def placeholders(self) -> Mapping[str, int]:
        """Return the id of the token that stands for a vector of `images`, by the field of the wire of tokens."""
        return {}

    def after_table(self) -> tuple[Stage, ...]:
        """Return the stages after the token table, in order, for a block that has a table."""
        return ()

    def stack(self) -> Layers | None:
        """Return the layers of a stack, which the module holds as `layers`; None for any other block."""
        return None

    def head(self) -> Head | None:
        """Return the head over a vocabulary, if the block is one."""
        return None


def expect(inputs: Signals, field: str, *types: str, width: int | None = None, length: int | None = None) -> Signal:
    """Return the signal of a wire after a check, for `output` of a block.

        def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
            return tfkit.expect(inputs, "input", "sequence", width=self.d_model)

    Args:
        inputs: the signals of all wires of the block.
        field: the name of the wire.
        types: the types that the signal may have, such as "sequence".
        width: the required width; None: any width.
        length: the required number of positions; None: any number.

    Raises:
        Invalid: the signal has another type, width or length, or belongs to an optional input.
    """
    signal: Signal = inputs[field]
    if signal.type not in types:
        takes = " or ".join(Signal(cast(Any, type_name)).in_words() for type_name in types)
        help = "put an `embedding` between the two" if signal.type == "tokens" and "sequence" in types else None
        raise Invalid(field, f"`{field}` must be {takes}; got {signal.in_words()}", help=help)
    if signal.optional and signal.type != "positions":
        help = "remove `optional: true` from the input"
        raise Invalid(field, f"`{field}` must always have a value, but the input that it names is optional", help=help)
    if width is not None and signal.width != width:
        raise Invalid(
            field,
            f"`{field}` must have the width of d_model, {width}; got {signal.in_words()}",
            help="set d_model of one of the two nodes, or put a `linear` node between them",
        )
    if length is not None and signal.length != length:
        description = "any length" if signal.length is None else f"{signal.length} positions"
        raise Invalid(
            field,
            f"`{field}` must be sequences of exactly {length} positions; got {description}",
            help=f"write the fixed length of the input: `length: {length}`",
        )
    return signal

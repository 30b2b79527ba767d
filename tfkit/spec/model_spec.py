"""The top level of a spec: the name, inputs, graph and outputs of a model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tfkit.component import BlockConfig, Config, Dim, Immaterial, InitConfig, slot
from tfkit.errors import Invalid
from tfkit.spec.document import NAME, Document
from tfkit.spec.merge import MODEL_KEYS

IMAGE = {"channels": 3, "height": 224, "width": 224}
"""The sizes of an image, with common values."""


class InputConfig(Config):
    """An input of the model."""

    word_key = "type"

    type: Literal["tokens", "positions", "features", "image", "images", "vector", "lengths"]
    """tokens [b, t], positions [b, t] or [b, t, width] and lengths [b] are whole numbers; features [b, t, width],
    image [b, channels, height, width], images [b, n, channels, height, width], with any number of images for each row,
    and vector [b, width] are real numbers."""
    width: Dim | None = None
    """Width of the features or of the vector; columns of the image; number of axes of the positions."""
    height: Dim | None = None
    """Rows of the image."""
    channels: Dim | None = None
    """Channels of the image, such as 3 for colors."""
    length: Dim | None = None
    """Positions of every sequence, where a block takes exactly that many, as for image patches."""
    padded: Immaterial[bool] = False
    """True if sequences of a fixed length have a padding mask. Sequences of any length always have a mask."""
    optional: Immaterial[bool] = False
    """True if the model may be called without it: additional tables of an embedding, and positions, which are then
    counted."""

    def check(self) -> None:
        """Raise `Invalid` unless the sizes are exactly the sizes that the type requires."""
        super().check()
        several = {"image": "images", "vector": "vectors"}.get(self.type, self.type)
        vectors = {"width": 768}
        sizes = {"features": vectors, "image": IMAGE, "images": IMAGE, "vector": vectors}.get(self.type, {})
        for name in IMAGE:
            if name in sizes and getattr(self, name) is None:
                example = ", ".join(f"{key}: {value}" for key, value in {"type": self.type, **sizes}.items())
                raise Invalid(name, f"an input of {several} needs a `{name}`", help=f"write `{{{example}}}`")
            has_axes = self.type == "positions" and name == "width"
            if name not in sizes and getattr(self, name) is not None and not has_axes:
                raise Invalid(name, f"`{name}` has no effect: {several} have none", help="remove it")
        if not self.is_sequence and self.length is not None:
            raise Invalid("length", f"`length` has no effect: an input of {several} has no positions")
        if self.padded and (self.length is None or self.type == "positions"):
            raise Invalid("padded", "`padded` has no effect: only sequences with a `length` can lack a padding mask")
        if self.type not in ("tokens", "positions") and self.optional:
            raise Invalid(
                "optional",
                f"an input of {several} cannot be optional",
                help="use `optional` only for an input of tokens or of positions",
            )

    @property
    def is_sequence(self) -> bool:
        """True if the input has positions."""
        return self.type in ("tokens", "positions", "features")

    @property
    def is_real(self) -> bool:
        """True if the values are real numbers, in the dtype of the model."""
        return self.type in ("features", "image", "images", "vector")


class ModelSpec(Document):
    """A model, every value resolved."""

    sort, command, typical = "model", "show", ("graph",)
    merge_keys = MODEL_KEYS

    name: str = Field(pattern=NAME, max_length=100)
    """The name of the model."""
    source: str | None = None
    """The paper or the reference implementation."""
    description: str | None = None
    """A summary of the model: its distinctive features."""
    requires: tuple[str, ...] | None = None
    """The plugins that its components come from, as `pip` names them, with versions or without: `tfkit-moe>=0.2`."""
    inputs: dict[str, InputConfig] = Field(default_factory=lambda: {"tokens": InputConfig(type="tokens")})
    """The inputs of the model, in order."""
    graph: dict[str, BlockConfig]
    """The nodes, in order."""
    outputs: tuple[str, ...] | None = None
    """The nodes whose values the model returns; the last node unless given."""
    init: InitConfig = slot("fan_in")
    """The initialization of the weights."""
    parameters: int | None = Field(default=None, ge=0)
    """The number of parameters; checked when the model is built. Specs that extend this one state their own."""
    checkpoint: str | dict[str, Any] | None = None
    """The family with the names of its tensors and fields in published checkpoints: a name, a path, or one in place."""

    def check(self) -> None:
        """Raise `Invalid` for a model without inputs or nodes."""
        super().check()
        if not self.inputs:
            raise Invalid("inputs", "a model needs an input", help="remove `inputs` for a single input of tokens")
        if not self.graph:
            raise Invalid("graph", "the graph has no nodes", help="write a line `name: {block: ...}` for each node")

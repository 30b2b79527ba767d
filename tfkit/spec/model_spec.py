"""The top level of a spec: the model's name, its inputs, its graph, its outputs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tfkit.component import BlockConfig, Config, Dim, Immaterial, InitConfig, slot
from tfkit.errors import Invalid
from tfkit.spec.document import NAME, Document
from tfkit.spec.merge import MODEL_KEYS


class InputConfig(Config):
    """An input of the model."""

    word_key = "type"

    type: Literal["tokens", "features", "vector", "lengths"]
    """tokens [b, t] and lengths [b] whole numbers, features [b, t, width] and vector [b, width] real numbers."""
    width: Dim | None = None
    """Width of the features, or of the vector."""
    length: Dim | None = None
    """Positions of every sequence, where a block takes exactly that many, as for image patches; never padded."""
    optional: Immaterial[bool] = False
    """True if the model may be called without it; only for the additional tables of an embedding."""

    def check(self) -> None:
        """Refuse features and vectors without a width, and a width for anything else."""
        super().check()
        if self.real and self.width is None:
            raise Invalid("width", f"{self.what} needs a `width`", help=f"write `{{type: {self.type}, width: 768}}`")
        if not self.real and self.width is not None:
            raise Invalid("width", f"`width` has no effect: {self.type} have none", help="remove it")
        if self.type == "lengths" and self.length is not None:
            raise Invalid("length", "`length` has no effect: an input of lengths has a single number for each sequence")
        if self.type == "vector" and self.length is not None:
            raise Invalid("length", "`length` has no effect: a vector has no positions", help="remove it")
        if self.type != "tokens" and self.optional:
            raise Invalid(
                "optional",
                f"{self.what} cannot be optional",
                help="use `optional` only for an input of tokens",
            )

    @property
    def what(self) -> str:
        """Its type with an article."""
        return "a vector" if self.type == "vector" else f"an input of {self.type}"

    @property
    def real(self) -> bool:
        """True if it has real numbers, in the type of the model."""
        return self.type in ("features", "vector")


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
        """Refuse a model without inputs or nodes."""
        super().check()
        if not self.inputs:
            raise Invalid("inputs", "a model needs an input", help="remove `inputs` for a single input of tokens")
        if not self.graph:
            raise Invalid("graph", "the graph has no nodes", help="write a line `name: {block: ...}` for each node")

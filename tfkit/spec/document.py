"""The top of a spec: what a model is called, what goes in, the graph, what comes out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tfkit.component import BlockConfig, Config, Dim, InitConfig, slot
from tfkit.errors import Invalid

VERSION = 1


class InputConfig(Config):
    """Something the model is called with."""

    word_key = "type"

    type: Literal["tokens", "features", "lengths"]
    """tokens [b, t] whole numbers, features [b, t, width] real numbers, lengths [b] whole numbers."""
    width: Dim | None = None
    """Width of the features."""
    optional: bool = False
    """Whether the model may be called without it; only for the further tables of an embedding."""

    def check(self) -> None:
        """Refuse features without a width, and a width of anything else."""
        super().check()
        if self.type == "features" and self.width is None:
            raise Invalid("", "an input of features needs a `width`")
        if self.type != "features" and self.width is not None:
            raise Invalid("width", f"`width` has no effect: {self.type} have none")
        if self.type != "tokens" and self.optional:
            raise Invalid("optional", f"an input of {self.type} cannot be optional")


class ModelSpec(Config):
    """A model, every value resolved."""

    tfkit: Literal[1]
    """Version of the spec language."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    """What the model is called."""
    source: str | None = None
    """The paper or the reference implementation."""
    description: str | None = None
    """What is special about it."""
    inputs: dict[str, InputConfig] = Field(default_factory=lambda: {"tokens": InputConfig(type="tokens")})
    """What the model is called with, in order."""
    graph: dict[str, BlockConfig]
    """The nodes, in order."""
    outputs: tuple[str, ...] | None = None
    """The nodes whose values the model returns; the last one unless given."""
    init: InitConfig = slot("torch")
    """How the weights start."""

"""An output of the model as a term of the loss, without torch: run files state it, and the loss computes it."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from tfkit.component import Changeable, Config, PositiveFloat


class OutputConfig(Config):
    """An output of the model as a term of the loss."""

    word_key: ClassVar[str | None] = "weight"

    weight: Changeable[PositiveFloat] = 1.0
    """Factor of the output's loss."""
    shift: Annotated[int, Field(ge=1, le=2**40)] = 1
    """Distance from a position to its target, for targets that are tokens: 1 predicts the next token, 2 the token after
    it."""

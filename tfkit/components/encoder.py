"""Encoder: a stack that reads the whole sequence in both directions."""

from __future__ import annotations

from typing import Literal

from tfkit.components.stack import StackConfig
from tfkit.errors import Invalid


class EncoderConfig(StackConfig):
    """Layers that read the whole sequence."""

    block: Literal["encoder"] = "encoder"

    def check(self) -> None:
        """Refuse cross-attention: an encoder has no memory."""
        super().check()
        for path, layer in self.distinct():
            if (place := layer.place_of_cross_attention()) is not None:
                raise Invalid(
                    f"{path}{place}",
                    "an encoder has no cross-attention: it has no memory to read",
                    help="use `block: decoder` and `memory: NODE`",
                )

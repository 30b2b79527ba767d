"""Encoder: a stack that reads the whole sequence; with a memory, its layers have cross-attention too.

With a memory, it reads one sequence, which need not have an order, together with another: the image features of a
diffusion model and their text, the object queries of a detector and the image, the queries of a Q-Former.
"""

from __future__ import annotations

from typing import Literal

from tfkit.components.stack import StackConfig


class EncoderConfig(StackConfig):
    """Layers that read the whole sequence; with a memory, they have cross-attention too."""

    block: Literal["encoder"] = "encoder"

"""Encoder: a stack with attention in both directions; with a memory, its layers also have cross-attention.

Examples with a memory are the image features of a diffusion model, which attend to text; the object queries of a
detector, which attend to an image; and the queries of a Q-Former.
"""

from __future__ import annotations

from typing import Literal

from tfkit.components.stack import StackConfig


class EncoderConfig(StackConfig):
    """Layers with attention in both directions; with a memory, they also have cross-attention."""

    block: Literal["encoder"] = "encoder"

"""Images and sound: blocks at the two ends of a model, families that use them, and data."""

from __future__ import annotations

import tfkit
from tfkit_media.conv_stem import ConvStem, ConvStemConfig
from tfkit_media.fields import MultiplesConfig, RatioConfig, SidesConfig
from tfkit_media.images import ImagePairsConfig, ImagesConfig
from tfkit_media.patches import Patches, PatchesConfig
from tfkit_media.pooling import TokenPool, TokenPoolConfig

__all__ = [
    "ConvStem",
    "ConvStemConfig",
    "ImagePairsConfig",
    "ImagesConfig",
    "Patches",
    "PatchesConfig",
    "TokenPool",
    "TokenPoolConfig",
]


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    """Hand the configs to tfkit."""
    for config in (
        PatchesConfig,
        ConvStemConfig,
        TokenPoolConfig,
        ImagesConfig,
        ImagePairsConfig,
        SidesConfig,
        MultiplesConfig,
        RatioConfig,
    ):
        register(config)

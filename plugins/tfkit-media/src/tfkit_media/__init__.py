"""Images and sound: blocks at the two ends of a model, families that use them, and data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tfkit
from tfkit_media.contrast import Contrast, ContrastConfig, LateInteraction, LateInteractionConfig, MatchesConfig
from tfkit_media.conv_stem import ConvStem, ConvStemConfig, StackFrames, StackFramesConfig
from tfkit_media.fields import (
    AxialRopeConfig,
    FeatureLayerConfig,
    MergedConfig,
    MultiplesConfig,
    RatioConfig,
    RepeatedConfig,
    SidesConfig,
    SquaresConfig,
    StackedConfig,
    WidthOrConfig,
    WindowsConfig,
)
from tfkit_media.grid_bias import GridBias, GridBiasConfig
from tfkit_media.images import ImagePairsConfig, ImagesConfig, ImageTextsConfig, ShapesConfig
from tfkit_media.masks import GridWindows, GridWindowsConfig
from tfkit_media.patches import Patches, PatchesConfig
from tfkit_media.placing import (
    ImageBlocks,
    ImageBlocksConfig,
    ImagePositions,
    ImagePositionsConfig,
    JoinImages,
    JoinImagesConfig,
    MergePatches,
    MergePatchesConfig,
    PlaceImages,
    PlaceImagesConfig,
)
from tfkit_media.pooling import AttentionPool, AttentionPoolConfig, EndPool, EndPoolConfig, TokenPool, TokenPoolConfig
from tfkit_media.rope import GridRope, GridRopeConfig
from tfkit_media.waveforms import (
    ConvPosition,
    ConvPositionConfig,
    DeepConvPosition,
    DeepConvPositionConfig,
    GroupNorm,
    GroupNormConfig,
    WaveformStem,
    WaveformStemConfig,
)

__all__ = [
    "AttentionPool",
    "AttentionPoolConfig",
    "Contrast",
    "ContrastConfig",
    "ConvPosition",
    "ConvPositionConfig",
    "ConvStem",
    "ConvStemConfig",
    "DeepConvPosition",
    "DeepConvPositionConfig",
    "EndPool",
    "EndPoolConfig",
    "GridBias",
    "GridBiasConfig",
    "GridRope",
    "GridRopeConfig",
    "GridWindows",
    "GridWindowsConfig",
    "GroupNorm",
    "GroupNormConfig",
    "ImageBlocks",
    "ImageBlocksConfig",
    "ImagePairsConfig",
    "ImagePositions",
    "ImagePositionsConfig",
    "ImageTextsConfig",
    "ImagesConfig",
    "JoinImages",
    "JoinImagesConfig",
    "LateInteraction",
    "LateInteractionConfig",
    "MergePatches",
    "MergePatchesConfig",
    "Patches",
    "PatchesConfig",
    "PlaceImages",
    "PlaceImagesConfig",
    "ShapesConfig",
    "StackFrames",
    "StackFramesConfig",
    "TokenPool",
    "TokenPoolConfig",
    "WaveformStem",
    "WaveformStemConfig",
]


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    """Register the configs."""
    for config in (
        PatchesConfig,
        ConvStemConfig,
        WaveformStemConfig,
        ConvPositionConfig,
        DeepConvPositionConfig,
        GroupNormConfig,
        StackFramesConfig,
        TokenPoolConfig,
        EndPoolConfig,
        AttentionPoolConfig,
        ContrastConfig,
        LateInteractionConfig,
        ImageBlocksConfig,
        ImagePositionsConfig,
        JoinImagesConfig,
        MergePatchesConfig,
        PlaceImagesConfig,
        GridBiasConfig,
        GridRopeConfig,
        GridWindowsConfig,
        MatchesConfig,
        ImagesConfig,
        ImagePairsConfig,
        ImageTextsConfig,
        ShapesConfig,
        SidesConfig,
        SquaresConfig,
        StackedConfig,
        WindowsConfig,
        AxialRopeConfig,
        FeatureLayerConfig,
        MergedConfig,
        MultiplesConfig,
        RatioConfig,
        RepeatedConfig,
        WidthOrConfig,
    ):
        register(config)


@tfkit.hookimpl
def tfkit_reference() -> dict[str, dict[str, Callable[..., Any]]]:
    """Return the formulas of the blocks and positions."""
    from tfkit_media import reference

    return {
        "block": reference.BLOCKS,
        "mask_rule": {"grid_windows": reference.grid_windows},
        "position": {"grid_bias": reference.grid_bias, "grid_rope": reference.grid_rope},
    }

"""Sublayers of encoders, which depend on tokens on both sides.

`fourier.py` has the mixer of FNet, `mixed_conv.py` the attention of ConvBERT, `grouped.py` its FFN, `fields.py` a field
of config.json, and `reference.py` the formulas of all kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tfkit
from tfkit_encoders.fields import HeadRatioConfig
from tfkit_encoders.fourier import Fourier, FourierConfig
from tfkit_encoders.grouped import GroupedMLP, GroupedMLPConfig
from tfkit_encoders.mixed_conv import MixedConv, MixedConvConfig

__all__ = [
    "Fourier",
    "FourierConfig",
    "GroupedMLP",
    "GroupedMLPConfig",
    "MixedConv",
    "MixedConvConfig",
]


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    """Register the configs."""
    for config in (FourierConfig, MixedConvConfig, GroupedMLPConfig, HeadRatioConfig):
        register(config)


@tfkit.hookimpl
def tfkit_reference() -> dict[str, dict[str, Callable[..., Any]]]:
    """Return the formulas of the kinds."""
    from tfkit_encoders import reference

    return reference.KINDS

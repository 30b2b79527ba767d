"""Objectives: preferences of pairs and masked diffusion, as losses of a run, and their data."""

from __future__ import annotations

import tfkit
from tfkit_objectives.masked_diffusion import MaskedDiffusionConfig, MaskedDiffusionLoss
from tfkit_objectives.preferences import PreferencesConfig, PreferencesDataConfig, PreferencesLoss

__all__ = [
    "MaskedDiffusionConfig",
    "MaskedDiffusionLoss",
    "PreferencesConfig",
    "PreferencesDataConfig",
    "PreferencesLoss",
]


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    """Register the configs."""
    for config in (PreferencesDataConfig, PreferencesConfig, MaskedDiffusionConfig):
        register(config)

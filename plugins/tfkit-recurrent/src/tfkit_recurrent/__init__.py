"""Recurrent mixers: the kinds of the slot `mixer`, and an FFN with a token shift.

`recurrence.py` has the recurrences in chunks, `conv.py` the short convolution, `token_shift.py` the previous tokens,
`kernels.py` the kernels of other libraries, `rates.py` initial values, `fields.py` fields of config.json, `scaled.py`
an activation, `reference.py` the formulas of all kinds; each remaining file has one kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tfkit
from tfkit_recurrent.channel_mix import ChannelMix, ChannelMixConfig
from tfkit_recurrent.conv import CausalConv
from tfkit_recurrent.fields import (
    AdjustedWidthConfig,
    BlockTypesConfig,
    BoundsConfig,
    DeltaLayersConfig,
    ExpertCountConfig,
    HasNormConfig,
    KeyFactorConfig,
    ListedConfig,
    OptionalValueConfig,
    PeriodConfig,
    RescaleConfig,
    RoundedRootConfig,
    StepScaleConfig,
    WidthFactorConfig,
)
from tfkit_recurrent.gated_delta import DeltaRule, GatedDelta, GatedDeltaConfig
from tfkit_recurrent.kda import KimiDelta, KimiDeltaConfig
from tfkit_recurrent.lightning import Lightning, LightningConfig
from tfkit_recurrent.mamba import Mamba, MambaConfig
from tfkit_recurrent.mamba2 import Mamba2, Mamba2Config
from tfkit_recurrent.mlstm import MLSTM, MLSTMConfig
from tfkit_recurrent.recurrence import decaying_mean, delta_rule, linear_attention, linear_scan, running_max
from tfkit_recurrent.rg_lru import RGLRU, RGLRUConfig
from tfkit_recurrent.rwkv4 import RWKV4, RWKV4Config
from tfkit_recurrent.scaled import ScaledActivation, ScaledActivationConfig
from tfkit_recurrent.short_conv import ShortConv, ShortConvConfig

__all__ = [
    "MLSTM",
    "RGLRU",
    "RWKV4",
    "CausalConv",
    "ChannelMix",
    "ChannelMixConfig",
    "DeltaRule",
    "GatedDelta",
    "GatedDeltaConfig",
    "KimiDelta",
    "KimiDeltaConfig",
    "Lightning",
    "LightningConfig",
    "MLSTMConfig",
    "Mamba",
    "Mamba2",
    "Mamba2Config",
    "MambaConfig",
    "RGLRUConfig",
    "RWKV4Config",
    "ScaledActivation",
    "ScaledActivationConfig",
    "ShortConv",
    "ShortConvConfig",
    "decaying_mean",
    "delta_rule",
    "linear_attention",
    "linear_scan",
    "running_max",
]


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    """Register the configs."""
    for config in (
        ShortConvConfig,
        MambaConfig,
        Mamba2Config,
        GatedDeltaConfig,
        KimiDeltaConfig,
        LightningConfig,
        RGLRUConfig,
        RWKV4Config,
        ChannelMixConfig,
        MLSTMConfig,
        ScaledActivationConfig,
        AdjustedWidthConfig,
        BlockTypesConfig,
        BoundsConfig,
        DeltaLayersConfig,
        ExpertCountConfig,
        HasNormConfig,
        KeyFactorConfig,
        ListedConfig,
        OptionalValueConfig,
        PeriodConfig,
        RescaleConfig,
        RoundedRootConfig,
        StepScaleConfig,
        WidthFactorConfig,
    ):
        register(config)


@tfkit.hookimpl
def tfkit_reference() -> dict[str, dict[str, Callable[..., Any]]]:
    """Return the formulas of the mixers, of the FFN and of the activation."""
    from tfkit_recurrent import reference

    return reference.KINDS

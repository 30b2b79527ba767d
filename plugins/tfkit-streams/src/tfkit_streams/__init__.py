"""Residual streams: the kinds `manifold`, `gated`, `depth` and `modulated` of the slot `residual`, and further kinds.

`manifold.py`, `independent.py`, `gated.py` and `depth.py` have one kind each, `modulated.py` has a residual and a norm
that a condition changes, `layer_features.py` has the features of each layer of Gemma 4, `altup.py` the layer of Gemma
3n, `value_residual.py` an attention that mixes the values of the first layer with its values, `fields.py` fields of
config.json, and `precision.py` the type of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tfkit
from tfkit_streams.altup import AltUpConfig, LaurelConfig, SparseGLUConfig
from tfkit_streams.depth import DepthConfig
from tfkit_streams.fields import (
    DenseWidthConfig,
    DoubledConfig,
    EqualConfig,
    FeatureWidthConfig,
    KeysAsValuesConfig,
    LayerSizesConfig,
    MixtureConfig,
    SharedLayersConfig,
    SparsityConfig,
)
from tfkit_streams.gated import GatedConfig
from tfkit_streams.independent import IndependentConfig
from tfkit_streams.layer_features import FeatureGateConfig, LayerInputsConfig, ScaledSumConfig
from tfkit_streams.manifold import ManifoldConfig
from tfkit_streams.modulated import AdaptiveNormConfig, ModulatedConfig
from tfkit_streams.value_residual import ValueResidualConfig

__all__ = [
    "AdaptiveNormConfig",
    "AltUpConfig",
    "DepthConfig",
    "FeatureGateConfig",
    "GatedConfig",
    "IndependentConfig",
    "LaurelConfig",
    "LayerInputsConfig",
    "ManifoldConfig",
    "ModulatedConfig",
    "ScaledSumConfig",
    "SparseGLUConfig",
    "ValueResidualConfig",
]


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    """Hand the configs to tfkit."""
    for config in (
        ManifoldConfig,
        IndependentConfig,
        GatedConfig,
        DepthConfig,
        ModulatedConfig,
        AdaptiveNormConfig,
        LayerInputsConfig,
        FeatureGateConfig,
        ScaledSumConfig,
        AltUpConfig,
        LaurelConfig,
        SparseGLUConfig,
        SharedLayersConfig,
        EqualConfig,
        SparsityConfig,
        DoubledConfig,
        DenseWidthConfig,
        KeysAsValuesConfig,
        MixtureConfig,
        LayerSizesConfig,
        FeatureWidthConfig,
        ValueResidualConfig,
    ):
        register(config)


@tfkit.hookimpl
def tfkit_reference() -> dict[str, dict[str, Callable[..., Any]]]:
    """Return the formulas of the residuals, the norm and the sublayers."""
    from tfkit_streams import reference

    return reference.KINDS

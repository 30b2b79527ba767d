"""The built-in components: a plugin like any other. Files are named after components or slots."""

from __future__ import annotations

import importlib

import tfkit
from tfkit.component import kinds_in

MODULES = (
    "activation",
    "attention",
    "combine",
    "decoder",
    "disentangled",
    "embedding",
    "encoder",
    "feedforward",
    "fields.layer_variants",
    "fields.rotary",
    "fields.value",
    "fields.words",
    "head",
    "init",
    "input_position",
    "longrope",
    "mask_rule",
    "nodes",
    "norm",
    "rope",
    "rope_scaling",
    "score_bias",
)


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    """Register every config of the modules above that has a kind."""
    register(tfkit.ResidualConfig)
    for name in MODULES:
        for config in kinds_in(importlib.import_module(f"{__name__}.{name}")):
            register(config)

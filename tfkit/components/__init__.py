"""The built-in components: a plugin like any other. One file per component, named after the term to search for."""

from __future__ import annotations

import importlib
from typing import TypeGuard

import tfkit
from tfkit.component import Component

MODULES = (
    "activation",
    "alibi",
    "attention",
    "combine",
    "decoder",
    "embedding",
    "encoder",
    "feedforward",
    "fields.layer_variants",
    "fields.rotary",
    "fields.value",
    "fields.words",
    "head",
    "init",
    "learned",
    "longrope",
    "norm",
    "relative_bias",
    "rope",
    "rope_scaling",
    "runs.addition",
    "runs.calculator",
    "runs.callbacks",
    "runs.copy",
    "runs.cross_entropy",
    "runs.decoded",
    "runs.masked",
    "runs.metrics",
    "runs.mqar",
    "runs.muon",
    "runs.optimizers",
    "runs.packed",
    "runs.profile",
    "runs.schedules",
    "runs.text",
    "runs.tokenizers",
    "runs.tokens",
    "runs.trackers",
    "sinusoidal",
)


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    """Register every config of the modules above that has a kind."""
    for name in MODULES:
        module = importlib.import_module(f"{__name__}.{name}")
        for config in vars(module).values():
            if _is_own_kind(config, module.__name__):
                register(config)


def _is_own_kind(config: object, module: str) -> TypeGuard[type[Component]]:
    """Return True if `config` is written in `module` and has a kind: base classes have none."""
    if not isinstance(config, type) or not issubclass(config, Component) or config.__module__ != module:
        return False
    return config.word_key in config.model_fields

"""The built-in components: a plugin like any other. One file per component, named by the word one would search for."""

from __future__ import annotations

import importlib

import tfkit
from tfkit.component import Component

MODULES = (
    "activation",
    "alibi",
    "attention",
    "combine",
    "embedding",
    "feedforward",
    "head",
    "init",
    "learned",
    "norm",
    "relative_bias",
    "rope",
    "sinusoidal",
    "stack",
)


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    """Register every concrete config of the modules above."""
    for name in MODULES:
        module = importlib.import_module(f"{__name__}.{name}")
        for config in vars(module).values():
            if isinstance(config, type) and issubclass(config, Component) and config.__module__ == module.__name__:
                if config.word_key in config.model_fields:
                    register(config)

"""Runs as a plugin of tfkit: the kinds that fill the slots of a run."""

from __future__ import annotations

import importlib

import tfkit
from tfkit.component import kinds_in

MODULES = (
    "calculator",
    "callbacks",
    "columns",
    "contrastive",
    "distillation",
    "flow_matching",
    "jepa",
    "labelled",
    "masked_diffusion",
    "measured",
    "metrics",
    "mixture",
    "mlflow",
    "optimizers",
    "over",
    "pairs",
    "parametrizations",
    "preferences",
    "regression",
    "representation",
    "schedules",
    "spans",
    "tasks",
    "text",
    "text_pairs",
    "tokens",
    "wandb",
)


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    """Register every kind of the modules above."""
    for name in MODULES:
        for config in kinds_in(importlib.import_module(f"tfkit.run.kinds.{name}")):
            register(config)

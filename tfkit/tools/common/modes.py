"""Choices of options that several tools share, available without torch."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import click

from tfkit.console.options import Decorator

Mode: TypeAlias = Literal["train", "prefill", "decode"]
MODES: tuple[Mode, ...] = get_args(Mode)
Optimizer: TypeAlias = Literal["adamw", "adamw_float32", "sgd_momentum", "sgd"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
"""`adamw_float32` stores its two states, and a copy of weights in a shorter type, in float32: mixed precision."""
LENGTH = 2048
"""Default length of a sequence in tokens, unless the model is designed for fewer tokens."""


def mode_option(help: str) -> Decorator:
    """Return the option `--mode` with the help text of a command."""
    modes = click.Choice(MODES)
    return click.option("--mode", type=modes, default="train", show_default=True, metavar="MODE", help=help)

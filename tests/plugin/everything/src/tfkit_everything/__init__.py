"""The hooks: components, formats and checks."""

from collections.abc import Iterator

import tfkit
from tfkit_everything.parts import DoubledConfig, MaxoutConfig, TowerConfig


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(MaxoutConfig)
    register(TowerConfig)
    register(DoubledConfig)


@tfkit.hookimpl
def tfkit_export_formats() -> list[type[tfkit.Format]]:
    from tfkit_everything.npz import Npz

    return [Npz]


@tfkit.hookimpl
def tfkit_checks(graph: tfkit.Graph) -> Iterator[tfkit.Diagnostic]:
    for path, config in graph.configs(MaxoutConfig):
        if config.d_ff % 8:
            yield tfkit.Diagnostic("widths beside the multiples of 8 are slow", path=f"{path}.d_ff")

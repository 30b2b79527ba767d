"""Performance limits of devices, from `devices.toml` or from a user's file (see `device_file.py`)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Device:
    """The limits of one device.

    Attributes:
        name: its name in tfkit.
        title: the maker's name for it.
        driver_name: the driver's name for it; related devices with other figures have other names.
        tera_flops: 10^12 FLOPs per second of dense matrix products, by type.
        memory: bytes.
        bandwidth: bytes per second between memory and chip.
        source: where the figures are published.
    """

    name: str
    title: str
    driver_name: str
    tera_flops: Mapping[str, float]
    memory: int
    bandwidth: float
    source: str

    def flops(self, dtype: str) -> float:
        """Return the FLOPs per second in a dtype. Raise ValueError if the device cannot compute in it."""
        if dtype not in self.tera_flops:
            raise ValueError(f"{self.title} does not compute in {dtype}: {', '.join(self.tera_flops)}")
        return self.tera_flops[dtype] * 1e12


@cache
def devices() -> dict[str, Device]:
    """Return the devices of `devices.toml`, by name."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: Device(name, **figures) for name, figures in tables.items()}


def device_of_driver(name: str) -> Device | None:
    """Return the device with this driver name; None if `devices.toml` does not contain it."""
    return next((device for device in devices().values() if device.driver_name == name), None)

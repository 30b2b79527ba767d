"""The limits of devices: those of `devices.toml`, or of a file of your own, see `device_file.py`."""

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
        """FLOPs per second in a type; raises ValueError if the device cannot compute in it."""
        if dtype not in self.tera_flops:
            raise ValueError(f"{self.title} does not compute in {dtype}: {', '.join(self.tera_flops)}")
        return self.tera_flops[dtype] * 1e12


@cache
def devices() -> dict[str, Device]:
    """The devices whose figures are known here, by name."""
    found = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: Device(name, **figures) for name, figures in found.items()}


def device_of_driver(name: str) -> Device | None:
    """The device by its driver's name; None if its figures are not known here."""
    return next((one for one in devices().values() if one.driver_name == name), None)

"""Performance limits of devices, from `devices.toml` or from a user's YAML file, read as strictly as a spec.

title: My accelerator          # by default, the file's name
flops: {bfloat16: 300e12, float32: 60e12}
bandwidth: 2e12
memory: 80e9
interconnect: 300e9            # optional
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tfkit.component import Config, PositiveFloat
from tfkit.errors import Invalid, SpecError, closest_name, listing
from tfkit.plugin.manager import Plugins, load_plugins
from tfkit.spec.extending import SUFFIXES
from tfkit.spec.resolve import Resolver
from tfkit.spec.source import read


@dataclass(frozen=True)
class Device:
    """The limits of one device.

    Attributes:
        name: the device's name in tfkit.
        title: the manufacturer's name of the device.
        driver_name: the name that the driver reports; related devices with different figures have different names.
        tera_flops: 10^12 FLOPs per second of dense matrix products, by type.
        memory: memory size in bytes.
        bandwidth: bytes per second between memory and chip.
        source: the publication of the figures.
        interconnect: bytes per second to the other devices of a machine, in one direction; None if not known.
    """

    name: str
    title: str
    driver_name: str
    tera_flops: Mapping[str, float]
    memory: int
    bandwidth: float
    source: str
    interconnect: float | None = None

    def flops(self, dtype: str) -> float:
        """Return the FLOPs per second in a dtype. Raise ValueError if the device cannot compute in it."""
        if dtype not in self.tera_flops:
            raise ValueError(f"{self.title} does not compute in {dtype}: {', '.join(self.tera_flops)}")
        return self.tera_flops[dtype] * 1e12


@cache
def listed_devices() -> dict[str, Device]:
    """Return the devices of `devices.toml`, by name."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: Device(name, **figures) for name, figures in tables.items()}


def device_of_driver(name: str) -> Device | None:
    """Return the device with this driver name; None if `devices.toml` does not contain it."""
    return next((device for device in listed_devices().values() if device.driver_name == name), None)


# ---- the file of a user ----


TYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")


class DeviceConfig(Config):
    """The limits of a device."""

    title: str | None = None
    """The display name of the device; by default the name of the file."""
    flops: dict[str, PositiveFloat]
    """FLOPs per second of dense matrix products, two for each multiplication and addition, by type."""
    bandwidth: PositiveFloat
    """Bytes per second between memory and chip."""
    memory: PositiveFloat
    """Memory size in bytes."""
    interconnect: PositiveFloat | None = None
    """Bytes per second to the other devices of a machine, in one direction."""

    def check(self) -> None:
        """Raise `Invalid` for dtypes in which no model computes."""
        super().check()
        if not self.flops:
            raise Invalid(
                "flops", "`flops` is empty", help="write the FLOPs per second of each type: `{bfloat16: 300e12}`"
            )
        for name in self.flops:
            if name not in TYPES:
                near = closest_name(name, TYPES)
                help = f"a type with a similar name: `{near}`" if near else None
                raise Invalid(f"flops.{name}", f"unknown type `{name}`", notes=[f"types: {listing(TYPES)}"], help=help)


def find_device(name: str, *, folder: Path | None = None, plugins: Plugins | None = None) -> Device:
    """Return the device with this name, or the device that a file describes. A path is relative to `folder`.

    Raises `Invalid` for an unknown name, and SpecError for a file that cannot be read or has an error.
    """
    if name in listed_devices():
        return listed_devices()[name]
    if name.endswith(SUFFIXES):
        return read_device((folder or Path()) / name, plugins=plugins)
    near = closest_name(name, list(listed_devices()))
    help = f"a device with a similar name: `{near}`" if near else "your own figures can be in a file: mine.yaml"
    raise Invalid("device", f"there are no figures for `{name}`; known: {', '.join(listed_devices())}", help=help)


def read_device(path: str | os.PathLike[str], *, plugins: Plugins | None = None) -> Device:
    """Read the device that a YAML file describes. Raise SpecError if the file cannot be read or has an error."""
    path, resolver = Path(path), Resolver(plugins or load_plugins())
    config = resolver.config(DeviceConfig, read(path), ("device",), {})
    if resolver.diagnostics:
        raise SpecError(*resolver.diagnostics)
    assert isinstance(config, DeviceConfig)
    tera = {name: flops / 1e12 for name, flops in config.flops.items()}
    title = config.title or path.stem
    return Device(path.stem, title, "", tera, int(config.memory), config.bandwidth, str(path), config.interconnect)

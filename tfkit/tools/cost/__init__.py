"""The costs of a model: FLOPs, bytes moved, memory, and the least time that a device needs."""

from tfkit.tools.cost.count import OPTIMIZERS, UncountableError, cost
from tfkit.tools.cost.device_file import read_device
from tfkit.tools.cost.devices import DEVICES, Device
from tfkit.tools.cost.result import ComponentCost, Cost, Floor, Memory, Mode, Row

__all__ = [
    "DEVICES",
    "OPTIMIZERS",
    "ComponentCost",
    "Cost",
    "Device",
    "Floor",
    "Memory",
    "Mode",
    "Row",
    "UncountableError",
    "cost",
    "read_device",
]

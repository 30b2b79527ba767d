"""The share of a device's matrix products per second that a run used (https://arxiv.org/abs/2204.02311, appendix B)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tfkit.run.checked_run import Run
from tfkit.tools.cost.cost import cost
from tfkit.tools.cost.devices import Device, device_of_driver


@dataclass(frozen=True)
class Utilisation:
    """FLOPs of the model, without any that are computed again, over those that the device could have made.

    Attributes:
        causal: without the pairs of query and key that a mask hides.
        full: with them.
    """

    causal: float
    full: float


def known_device(run: Run) -> Device | None:
    """Return the device of a run; None if its limits are not known."""
    name = run.config.machine.device
    if not name.startswith("cuda") or not torch.cuda.is_available():
        return None
    device = device_of_driver(torch.cuda.get_device_name(name))
    return device if device is not None and run.config.precision in device.tera_flops else None


def utilisation(run: Run, tokens_per_second: float, device: Device | None) -> Utilisation | None:
    """Return the utilisation of a device at that speed; None if the device is not known."""
    if device is None:
        return None
    precision = run.config.precision
    total = cost(run.graph, batch=1, length=run.data.length, dtype=precision).total
    examples = tokens_per_second / run.data.length
    share = examples / device.flops(precision)
    full = total.flops_forward + total.flops_backward
    return Utilisation(causal=(total.visible_forward + total.visible_backward) * share, full=full * share)

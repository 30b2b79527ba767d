"""What a profile holds. Times are seconds of one step, the mean of those that count; sizes are bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Literal

from tfkit.tools.ownership import By, in_rows

Mode = Literal["train", "prefill", "decode"]
STEP_ROWS = ("model", "compiled", "loss", "optimizer", "zero_grad")
"""Rows of a step that are no part of the model: `model` is what it does between its nodes, such as to empty its caches,
in training part of `loss`; `compiled` is a model that was compiled as a whole."""


@dataclass(frozen=True)
class PartTime:
    """One part of the model, or one of `STEP_ROWS`, whose `node` and `layer` are its own name.

    `forward + backward == time`; a layer that is computed twice counts its second run as backward. What a part computes
    inside another one counts for the inner one alone.
    """

    path: str
    """The module whose own work this is: `decoder.layers.0.attention`."""
    component: str
    """As in `tfkit params`: `attention`, `cross_attention`, `ffn`, `norm`, `embedding`, `decoder`, `head`."""
    label: str
    """The component for people; for a norm its class."""
    node: str
    layer: str
    calls: int
    """How often it runs in one step."""
    forward: float
    backward: float
    device: float
    """Time of its kernels on an accelerator; 0 on the CPU."""
    allocated: int
    """Bytes that it asks for in one step, forward and backward."""
    at_peak: int
    """Bytes that it has asked for in this step and that are in use when memory is at its peak."""
    highest: int
    """The most bytes in use, of everybody, while it runs."""
    flops: float | None = None
    """What `tfkit cost` counts for one step; None where it counts nothing."""
    bytes: float | None = None
    """Bytes that it must at least read and write, by `tfkit cost`."""
    floor: float | None = None
    """The least time that these take by the limits of the device; None where the limits are not known."""

    @property
    def time(self) -> float:
        """Seconds of one step."""
        return self.forward + self.backward

    @property
    def flops_per_second(self) -> float | None:
        """Achieved FLOP/s."""
        return self.flops / self.time if self.flops is not None and self.time else None

    @property
    def bytes_per_second(self) -> float | None:
        """Achieved bytes/s."""
        return self.bytes / self.time if self.bytes is not None and self.time else None


@dataclass(frozen=True)
class KernelTime:
    """All runs of one operator (CPU) or kernel (accelerator) that one component launched."""

    name: str
    component: str
    label: str
    phase: str
    """`forward` or `backward`."""
    calls: float
    """In one step."""
    time: float


@dataclass(frozen=True)
class Limits:
    """What a device can do."""

    name: str
    flops: float
    """FLOP/s in the type of the model."""
    bandwidth: float
    """Bytes per second."""
    source: str
    """Where these come from; `measured` where they were measured in this run."""


@dataclass(frozen=True)
class Memory:
    """Bytes in use on the device."""

    peak: int
    """The most in one step."""
    at_start: int
    """Before the step: weights, optimizer state, caches, gradients that still lie there."""
    weights: int
    optimizer: int
    gradients: int
    cache: int
    part: str
    """The path of the part that runs at the peak."""
    phase: str
    """`forward` or `backward`."""


@dataclass(frozen=True)
class Profile:
    """A profiled model."""

    name: str
    device: str
    """As torch calls it: `cpu`, `cuda:0`."""
    device_name: str
    """For people: `NVIDIA H200`, `AMD EPYC, 2 threads`."""
    mode: Mode
    dtype: str
    batch: int
    length: int
    compiled: bool
    parameters: int
    steps: tuple[float, ...]
    """Seconds of each profiled step that took no longer than their median: something else held up the others."""
    plain_steps: tuple[float, ...]
    """Seconds of each step without the profiler, in the same run."""
    parts: tuple[PartTime, ...]
    """In the order of the model; then the rows of `STEP_ROWS` that there are."""
    kernels: tuple[KernelTime, ...]
    """The longest first."""
    unattributed: float
    """What is between the parts: parts and this add up to the mean of `steps`."""
    idle: float
    """How long the accelerator waits in one step; 0 on the CPU."""
    memory: Memory
    limits: Limits | None
    notes: tuple[str, ...]
    """What the reader has to know: what was not possible, what is not told apart."""
    files: tuple[str, ...] = ()
    """What was written, relative to the folder."""

    @property
    def step(self) -> float:
        """Seconds of a step under the profiler: the mean, which `parts` and `unattributed` add up to."""
        return fmean(self.steps)

    @property
    def plain_step(self) -> float:
        """Seconds of a step without the profiler: the mean of those that took no longer than their median."""
        return fmean(one for one in self.plain_steps if one <= median(self.plain_steps))

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * (1 if self.mode == "decode" else self.length)

    @property
    def attributed(self) -> float:
        """The share of the step that has a name."""
        return 1 - self.unattributed / self.step


def rows(profile: Profile, by: By = "component") -> tuple[PartTime, ...]:
    """The parts of a profile added up by component, node or layer, in the order of `tfkit params`.

    In a row of several parts `path` is the name of the row, and so is `label` where the parts have several; `highest`
    is the greatest of theirs.
    """
    made = [_sum(name, label, group) for name, label, group in in_rows(profile.parts, by)]
    own = [row for row in made if row.component not in STEP_ROWS]
    return (*own, *(row for row in made if row.component in STEP_ROWS))


def _sum(name: str, label: str, group: list[PartTime]) -> PartTime:
    return replace(
        group[0],
        path=name,
        label=label,
        calls=sum(part.calls for part in group),
        forward=sum(part.forward for part in group),
        backward=sum(part.backward for part in group),
        device=sum(part.device for part in group),
        allocated=sum(part.allocated for part in group),
        at_peak=sum(part.at_peak for part in group),
        highest=max(part.highest for part in group),
        flops=_total(part.flops for part in group),
        bytes=_total(part.bytes for part in group),
        floor=_total(part.floor for part in group),
    )


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None

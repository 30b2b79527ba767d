"""The data of a profile. Times are seconds of one step, the mean of those that count; sizes are bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, pstdev
from typing import Any

from tfkit.console.output import merged
from tfkit.tools.common.modes import Mode
from tfkit.tools.common.ownership import By, in_rows

STEP_ROWS = ("model", "compiled", "loss", "optimizer", "zero_grad")
"""Rows of a step outside the model: `model` is its work between nodes, such as emptying caches, in training part of
`loss`; `compiled` is a model that was compiled as a whole."""


@dataclass(frozen=True)
class ComponentTime:
    """One owner of time in the model, or one of `STEP_ROWS`, whose `node` and `layer` are its own name.

    `forward + backward == time`; a recomputed layer counts its second run as backward. Time inside an inner owner
    counts only for the inner one.
    """

    path: str
    """The module that does this work itself: `decoder.layers.0.attention`."""
    component: str
    """As in `tfkit params`: `attention`, `cross_attention`, `ffn`, `norm`, `embedding`, `decoder`, `head`."""
    label: str
    """The component's name for people; for a norm its class."""
    node: str
    layer: str
    calls: int
    """The number of its runs in one step."""
    forward: float
    backward: float
    device: float
    """Time of its kernels on an accelerator; 0 on the CPU."""
    allocated: int
    """Bytes that it allocates in one step, forward and backward."""
    at_peak: int
    """Bytes that it has allocated in this step and that are in use at the peak."""
    highest: int
    """The most bytes in use, by all owners, while it runs."""
    flops: float | None = None
    """FLOPs of one step by `tfkit cost`; None if it does not count them."""
    bytes: float | None = None
    """Bytes that it must at least read and write, by `tfkit cost`."""
    floor: float | None = None
    """The least time for these by the limits of the device; None if the limits are not known."""

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
    """Runs in one step."""
    time: float


@dataclass(frozen=True)
class Limits:
    """The limits of a device."""

    name: str
    flops: float
    """FLOP/s in the type of the model."""
    bandwidth: float
    """Bytes per second."""
    source: str
    """The origin of these; `measured` if they were measured in this run."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use on the device."""

    peak: int
    """The most in one step."""
    at_start: int
    """Before the step: weights, optimizer state, caches, gradients that still exist, and the inputs."""
    weights: int
    optimizer: int
    gradients: int
    cache: int
    part: str = ""
    """The path of the owner that runs at the peak."""
    phase: str = "forward"
    """`forward` or `backward`."""


@dataclass(frozen=True)
class Profile:
    """A profiled model."""

    name: str
    device: str
    """The device's name in torch: `cpu`, `cuda:0`."""
    device_name: str
    """The device's name for people: `NVIDIA H200`, `AMD EPYC, 2 threads`."""
    mode: Mode
    dtype: str
    batch: int
    length: int
    compiled: bool
    parameters: int
    steps: tuple[float, ...]
    """Seconds of each profiled step that took no longer than their median: the others were disturbed."""
    plain_steps: tuple[float, ...]
    """Seconds of each step without the profiler, in the same run."""
    parts: tuple[ComponentTime, ...]
    """In the order of the model; then the `STEP_ROWS` that occur."""
    kernels: tuple[KernelTime, ...]
    """The longest first."""
    unattributed: float
    """The time between the parts: parts and this add up to the mean of `steps`."""
    idle: float
    """The time that the accelerator waits in one step; 0 on the CPU."""
    memory: MemoryUse
    limits: Limits
    notes: tuple[str, ...]
    """Notes for the reader: measurements that were not possible, and rows that cover several components."""

    @property
    def step(self) -> float:
        """Seconds of a step under the profiler: the mean, which `parts` and `unattributed` add up to."""
        return fmean(self.steps)

    @property
    def plain_step(self) -> float:
        """Seconds of a step without the profiler: the mean of those that took no longer than their median."""
        return fmean(seconds for seconds in self.plain_steps if seconds <= median(self.plain_steps))

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * (1 if self.mode == "decode" else self.length)

    @property
    def attributed(self) -> float:
        """The share of the step that has a name."""
        return 1 - self.unattributed / self.step


def rows(profile: Profile, by: By = "component") -> tuple[ComponentTime, ...]:
    """Sum the parts of a profile by component, node or layer, in the order of `tfkit params`.

    In a row of several parts `path` is the name of the row, and so is `label` if theirs differ; `highest` is the
        greatest of theirs.
    """
    sums = [_sum(name, label, group) for name, label, group in in_rows(profile.parts, by)]
    return tuple(sorted(sums, key=lambda row: row.component in STEP_ROWS))


def labels_of(profiles: Sequence[Profile], by: By = "component") -> dict[str, str]:
    """Return the label of each row by its name; the name itself if the models have different labels for it."""
    labels_by_profile = [{row.path: row.label for row in rows(profile, by)} for profile in profiles]
    names = {
        name: {labels[name] for labels in labels_by_profile if name in labels}
        for name in merged([list(labels) for labels in labels_by_profile])
    }
    return {name: labels.pop() if len(labels) == 1 else name for name, labels in names.items()}


def undecided(profiles: Sequence[Profile]) -> Iterator[str]:
    """Yield a sentence for each profile whose step is not shown to differ from the first profile's step.

    Its deviations overlap, or the profiler reverses the direction of the difference.
    """
    first = profiles[0]
    for profile in profiles[1:]:
        plain, profiled = profile.plain_step / first.plain_step, profile.step / first.step
        spread = pstdev(profile.plain_steps) + pstdev(first.plain_steps)
        if (plain - 1) * (profiled - 1) < 0 or abs(profile.plain_step - first.plain_step) <= spread:
            ratios = f"{plain:.2f}× ± {spread / first.plain_step:.2f}, and {profiled:.2f}× under the profiler"
            yield f"{profile.name} and {first.name}: no difference shown; the ratio of their steps is {ratios}"


_SUMMED = ("calls", "forward", "backward", "device", "allocated", "at_peak")
_PREDICTED = ("flops", "bytes", "floor")


def _sum(name: str, label: str, group: list[ComponentTime]) -> ComponentTime:
    sums: dict[str, Any] = {field: sum(getattr(part, field) for part in group) for field in _SUMMED}
    for field in _PREDICTED:
        values = [value for part in group if (value := getattr(part, field)) is not None]
        sums[field] = sum(values) if values else None
    return replace(group[0], path=name, label=label, highest=max(part.highest for part in group), **sums)

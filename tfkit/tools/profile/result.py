"""The data of a profile. Times are seconds per step, as the mean of the undisturbed steps; sizes are bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, pstdev
from typing import Any

from tfkit.console.output import merge_rows
from tfkit.tools.common.modes import Mode
from tfkit.tools.common.ownership import By, in_rows

STEP_ROWS = ("model", "compiled", "loss", "optimizer", "zero_grad")
"""Rows of a step outside the model: `model` is its work between nodes, such as emptying caches, in training part of
`loss`; `compiled` is a fully compiled model."""


@dataclass(frozen=True)
class ComponentTime:
    """An owner of time in the model, or one of the `STEP_ROWS`, whose `node` and `layer` equal its name.

    `forward + backward == time`; a recomputed layer counts its second run as backward. Time inside an inner owner
    counts only for the inner one.
    """

    path: str
    """Path of the module that does the work: `decoder.layers.0.attention`."""
    component: str
    """Type of the component, as in `tfkit params`: `attention`, `cross_attention`, `ffn`, `norm`, `embedding`,
    `decoder`, `head`."""
    label: str
    """Display name of the component; for a norm, its class."""
    node: str
    layer: str
    calls: int
    """Number of calls in one step."""
    forward: float
    backward: float
    device: float
    """Time of the owner's kernels on an accelerator; 0 on the CPU."""
    allocated: int
    """Bytes that the owner allocates in one step, forward and backward."""
    at_peak: int
    """Bytes that the owner allocated in this step and that are in use at the peak."""
    highest: int
    """Peak of the bytes in use, by all owners, while this owner runs."""
    flops: float | None = None
    """FLOPs of one step, as counted by `tfkit cost`; None if they are not counted."""
    bytes: float | None = None
    """Minimum number of bytes to read and write, as counted by `tfkit cost`; None if they are not counted."""
    floor: float | None = None
    """Minimum time for `flops` and `bytes` at the limits of the device; None if it is not known."""

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
    """Number of runs in one step."""
    time: float


@dataclass(frozen=True)
class Limits:
    """The limits of a device."""

    name: str
    flops: float
    """FLOP/s in the dtype of the model."""
    bandwidth: float
    """Bytes per second."""
    source: str
    """Origin of the limits; `measured` if they were measured in this run."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use on the device."""

    peak: int
    """Peak in one step."""
    at_start: int
    """Bytes in use before the step: weights, optimizer state, caches, gradients that still exist, and the inputs."""
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
    """Display name of the device: `NVIDIA H200`, `AMD EPYC, 2 threads`."""
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
    """The owners of time, in the order of the model, followed by the `STEP_ROWS` that occur."""
    kernels: tuple[KernelTime, ...]
    """Operators or kernels, the slowest first."""
    unattributed: float
    """Time outside of all parts. The parts and this time add up to the mean of `steps`."""
    idle: float
    """Time in which the accelerator waits in one step; 0 on the CPU."""
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
        """Seconds of a step without the profiler: the mean of the steps that took no longer than the median."""
        return fmean(seconds for seconds in self.plain_steps if seconds <= median(self.plain_steps))

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * (1 if self.mode == "decode" else self.length)

    @property
    def attributed(self) -> float:
        """Fraction of the step that is attributed to a part."""
        return 1 - self.unattributed / self.step


def summed_rows(profile: Profile, by: By = "component") -> tuple[ComponentTime, ...]:
    """Sum the parts of a profile by component, node or layer, in the order of `tfkit params`.

    The `path` of a row is its name, and so is its `label` if the labels of its parts differ. Its `highest` is the
    maximum over the parts.
    """
    sums = [_summed_row(name, label, group) for name, label, group in in_rows(profile.parts, by)]
    return tuple(sorted(sums, key=lambda row: row.component in STEP_ROWS))


def labels_of(profiles: Sequence[Profile], by: By = "component") -> dict[str, str]:
    """Return the label of each row by its name. The label is the name if the models have different labels."""
    labels_by_profile = [{row.path: row.label for row in summed_rows(profile, by)} for profile in profiles]
    names = {
        name: {labels[name] for labels in labels_by_profile if name in labels}
        for name in merge_rows([list(labels) for labels in labels_by_profile])
    }
    return {name: labels.pop() if len(labels) == 1 else name for name, labels in names.items()}


def undecided_notes(profiles: Sequence[Profile]) -> Iterator[str]:
    """Yield a sentence for each profile whose step is not shown to differ from the first profile's step.

    Either the deviations of both steps overlap, or the profiler reverses the direction of the difference.
    """
    first = profiles[0]
    for profile in profiles[1:]:
        plain, profiled = profile.plain_step / first.plain_step, profile.step / first.step
        spread = pstdev(profile.plain_steps) + pstdev(first.plain_steps)
        if (plain - 1) * (profiled - 1) < 0 or abs(profile.plain_step - first.plain_step) <= spread:
            ratios = f"{plain:.2f}× ± {spread / first.plain_step:.2f}, and {profiled:.2f}× under the profiler"
            yield f"{profile.name} and {first.name}: no difference shown; the ratio of their steps is {ratios}"


_SUMMED_FIELDS = ("calls", "forward", "backward", "device", "allocated", "at_peak")
_PREDICTED = ("flops", "bytes", "floor")


def _summed_row(name: str, label: str, group: list[ComponentTime]) -> ComponentTime:
    sums: dict[str, Any] = {field: sum(getattr(part, field) for part in group) for field in _SUMMED_FIELDS}
    for field in _PREDICTED:
        values = [value for part in group if (value := getattr(part, field)) is not None]
        sums[field] = sum(values) if values else None
    return replace(group[0], path=name, label=label, highest=max(part.highest for part in group), **sums)

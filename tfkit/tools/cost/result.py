"""The costs of a model as data: components that add up, memory, and the least time that a device needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tfkit.tools.common.choices import Mode
from tfkit.tools.common.ownership import By, in_rows
from tfkit.tools.common.page import html_table
from tfkit.tools.common.units import bytes_text, flops_text
from tfkit.tools.cost.devices import Device


@dataclass(frozen=True)
class Amounts:
    """Quantities to add up. FLOPs count a multiplication and an addition as two; bytes are in the model's type.

    Attributes:
        flops_forward: FLOPs of matrix products, with every pair of query and key, including hidden pairs.
        flops_backward: FLOPs of the backward; 0 unless training. With `recompute`, they include the second forward.
        scores_forward: the part of `flops_forward` for the query-key pairs of attention.
        scores_backward: the part of `flops_backward` for the query-key pairs of attention.
        visible_forward: FLOPs without the pairs that the mask hides, as in a kernel that skips them.
        visible_backward: FLOPs of the backward without the pairs that the mask hides.
        parameters: weights that belong to it. Weights used twice are counted once, with their owner.
        active_parameters: weights that one token is multiplied by: of routed experts, the chosen experts.
        saved: bytes that the forward keeps for the backward.
        traffic_forward: minimum bytes to move: weights, inputs, outputs and cache, each once.
        traffic_backward: minimum bytes to move in the backward: saved tensors, weights, and all their gradients.
    """

    flops_forward: int = 0
    flops_backward: int = 0
    scores_forward: int = 0
    scores_backward: int = 0
    visible_forward: int = 0
    visible_backward: int = 0
    parameters: int = 0
    active_parameters: int = 0
    saved: int = 0
    traffic_forward: int = 0
    traffic_backward: int = 0

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward."""
        return self.flops_forward + self.flops_backward

    @property
    def visible(self) -> int:
        """FLOPs of forward and backward without hidden pairs."""
        return self.visible_forward + self.visible_backward

    @property
    def traffic(self) -> int:
        """Bytes moved by forward and backward."""
        return self.traffic_forward + self.traffic_backward

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte moved."""
        return self.flops / self.traffic if self.traffic else 0.0


@dataclass(frozen=True)
class ComponentCost(Amounts):
    """One component of the running model; `component`, `label`, `node` and `layer` as in an `Ownership`.

    Attributes:
        path: path of the module, as in the state dict.
    """

    path: str = ""
    component: str = ""
    label: str = ""
    node: str = ""
    layer: str = ""


@dataclass(frozen=True)
class Row(Amounts):
    """Components, or all of one node or layer, added up."""

    name: str = ""
    label: str = ""


@dataclass(frozen=True)
class Memory:
    """Bytes.

    Attributes:
        weights: parameters and buffers.
        gradients: gradients of the trained parameters.
        optimizer: the optimizer's states.
        activations: bytes that the full forward saves for the backward.
        activations_recomputed: `activations` if only layer inputs are saved, and one layer at a time is recomputed.
        cache: keys, values and states, and whatever else is kept of the tokens, for all sequences of the batch.
        cache_per_token: cached bytes of one token of one sequence, as long as it is within every window.
        states: bytes of the states of one sequence, which do not grow with its length.
        peak: peak memory use of a step.
        peak_recomputed: the peak with recomputed layers.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    activations_recomputed: int
    cache: int
    cache_per_token: int
    states: int
    peak: int
    peak_recomputed: int


@dataclass(frozen=True)
class Floor:
    """The least seconds on a device: max(FLOPs / peak FLOPs, bytes / bandwidth), component by component.

    Attributes:
        device: its name.
        compute: seconds if only FLOPs counted.
        transfer: seconds if only bytes counted.
        seconds: the larger one of each component, summed up, since components run one after the other.
        fits: True if the peak of memory fits into the device.
    """

    device: str
    compute: float
    transfer: float
    seconds: float
    fits: bool


@dataclass(frozen=True)
class Cost:
    """The costs of one step of a model: a training step, the reading of a prompt, or one more token.

    Attributes:
        name: name of the spec.
        mode: see `tfkit.cost`.
        batch: number of sequences.
        length: tokens of each: read at once, or, in decode, those in the cache including the newest one.
        memory_length: tokens that cross-attention reads; None without.
        dtype: type of weights and activations.
        optimizer: the optimizer whose states are counted; None unless training.
        recompute: True if layers run again in the backward; `memory` has both.
        parts: every component that runs or has parameters, in the order of the model.
        memory: bytes by their purpose.
    """

    name: str
    mode: Mode
    batch: int
    length: int
    memory_length: int | None
    dtype: str
    optimizer: str | None
    recompute: bool
    parts: tuple[ComponentCost, ...]
    memory: Memory

    @property
    def total(self) -> Row:
        """The sum of all components."""
        return add_up("total", "total", self.parts)

    def rows(self, by: By = "component") -> tuple[Row, ...]:
        """Return the components in rows that add up to `total`."""
        return tuple(row for row, _ in self.groups(by))

    def groups(self, by: By = "component") -> tuple[tuple[Row, list[ComponentCost]], ...]:
        """Return the rows with their components."""
        return tuple((add_up(name, label, parts), parts) for name, label, parts in in_rows(self.parts, by))

    @property
    def peak(self) -> int:
        """The most bytes at one moment of the step."""
        return self.memory.peak_recomputed if self.recompute else self.memory.peak

    def floor(self, device: Device, parts: Iterable[ComponentCost] | None = None, *, visible: bool = False) -> Floor:
        """Return the minimum time of a step on a device.

        Args:
            device: its limits, see `tfkit.tools.cost.devices`.
            parts: the components to sum over; all unless given.
            visible: leave out the pairs of query and key that the mask hides.

        Raises:
            ValueError: the device does not compute in this type.
        """
        peak = device.flops(self.dtype)
        compute = transfer = seconds = 0.0
        for part in self.parts if parts is None else parts:
            for flops, moved in part_phases(part, visible):
                compute += flops / peak
                transfer += moved / device.bandwidth
                seconds += max(flops / peak, moved / device.bandwidth)
        return Floor(device.name, compute, transfer, seconds, self.peak <= device.memory)

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        columns = ("component", "FLOPs", "bytes moved", "parameters")
        rows = [
            (row.label, flops_text(row.flops), bytes_text(row.traffic), f"{row.parameters:,}")
            for row in (*self.rows(), self.total)
        ]
        return html_table(f"{self.name}: {self.mode}, {self.dtype}", columns, rows)


def part_phases(part: Amounts, visible: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the FLOPs and bytes of the forward, and of the backward."""
    forward, backward = part.flops_forward, part.flops_backward
    if visible:
        forward, backward = part.visible_forward, part.visible_backward
    return (forward, part.traffic_forward), (backward, part.traffic_backward)


def add_up(name: str, label: str, parts: Iterable[Amounts]) -> Row:
    """Return the sum of components as a row."""
    amounts = list(parts)
    return Row(**{field: sum(getattr(part, field) for part in amounts) for field in _SUMMED}, name=name, label=label)


_SUMMED = tuple(Amounts.__dataclass_fields__)

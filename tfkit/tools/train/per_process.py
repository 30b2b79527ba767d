"""The predicted memory of each process of a run, the minimum time of a step, and changes that reduce the memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfkit.commands import bytes_text
from tfkit.graph.expand import Graph
from tfkit.learning.chunked_loss import chunk_count
from tfkit.run.checked_run import Run
from tfkit.run.run_spec import MachineConfig
from tfkit.run.training.processes import check_count
from tfkit.tools.common.modes import Optimizer
from tfkit.tools.cost.cost import bytes_of_states
from tfkit.tools.cost.devices import Device
from tfkit.tools.cost.step_memory import StepMemory, memory_of_step
from tfkit.tools.train.plan import trained_model

NUMBER = 4
"""Bytes of a float32 number, the dtype of weights, gradients and optimizer states."""
DEVICES = 8
"""Number of devices in a machine."""
USUAL_FRACTION = 0.4
"""The fraction of the peak FLOPs that large runs reach: 38 to 43% for Llama 3 (https://arxiv.org/abs/2407.21783)."""


@dataclass(frozen=True)
class PerProcess:
    """Predicted memory of one process, in bytes, at the peak of a step with several micro-batches.

    The peak is in the loss, where all logits of a chunk exist, or in the backward pass of a layer.

    Attributes:
        processes: the number of processes.
        shard: the number of processes that share one copy of the weights.
        weights: the process's shard of the weights.
        gradients: its shard of the gradients.
        states: its shard of the optimizer's states.
        gathered: full weights and gradients outside of layers, and of a layer in its backward pass. A single process
            gathers no weights.
        activations: activations that are saved for the backward pass, and activations of a recomputed layer.
        casts: bfloat16 copies of weights that autocast keeps, because the weights were gathered in float32.
        logits: logits of a chunk of the loss, with their gradients.
        evaluation: memory of an evaluation, which runs layer by layer between two steps; 0 without evaluations.
        sent: bytes that the process receives in a step, which equal the bytes that it sends.
        copied: the part of `sent` that comes from other copies of the weights.
        flops: FLOPs of a step, including recomputed layers, without the query-key pairs that a mask hides.
    """

    processes: int
    shard: int
    weights: int
    gradients: int
    states: int
    gathered: int
    activations: int
    casts: int
    logits: int
    evaluation: int
    sent: int
    copied: int
    flops: int

    @property
    def parts(self) -> dict[str, int]:
        """The bytes by their purpose."""
        names = ("weights", "gradients", "states", "gathered", "activations", "casts", "logits")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        """The sum of all parts, in bytes."""
        return sum(self.parts.values())

    @property
    def peak(self) -> int:
        """The bytes that must fit into memory: the larger of a step and an evaluation."""
        return max(self.total, self.evaluation)


def per_process(
    run: Run,
    processes: int,
    optimizer: Optimizer,
    machine: MachineConfig | None = None,
    counted: dict[int, StepMemory] | None = None,
) -> PerProcess:
    """Return the memory of each of `processes` processes, by default with the run's `machine`.

    `counted` is a cache of the memory of steps by the size of their micro-batches.

    Raises SpecError if `processes` processes cannot train the run.
    """
    check_count(run, processes)
    machine = machine or run.config.machine
    sequences = run.config.batch.largest // processes
    size = machine.micro_batch
    micro, shard = min(size if isinstance(size, int) else sequences, sequences), machine.shard or processes
    counted = {} if counted is None else counted
    if micro not in counted:
        bfloat16 = run.config.precision == "bfloat16"
        counted[micro] = memory_of_step(trained_model(run), micro, run.longest, bfloat16=bfloat16)
    memory, total = counted[micro], counted[micro].parameters
    layers = _layer_sizes(run, memory)
    largest, single = max(layers, default=0), total - sum(layers)
    sent = NUMBER if machine.gather == "float32" else 2
    rows = micro * run.longest
    vocabulary = max((node.output.width or 0 for node in run.graph.nodes if node.output.type == "logits"), default=0)
    steps = -(-sequences // micro)
    gathers = (shard - 1) / shard * (2 * sent * sum(layers) + NUMBER * single + NUMBER * memory.trained)
    copied = 2 * (processes - shard) / processes * NUMBER * memory.trained / shard
    weights, gradients = -(-NUMBER * total // shard), -(-NUMBER * memory.trained // shard)
    states = -(-bytes_of_states(optimizer, NUMBER) * memory.trained // shard)
    logits = NUMBER * vocabulary * -(-rows // chunk_count(rows, vocabulary)) if vocabulary else 0
    layer = max((layer.kept for layer in memory.layers.values()), default=memory.activations)
    copies = NUMBER * single + 2 * sent * largest if processes > 1 else 0
    evaluated = weights + gradients + states + copies + layer + 2 * logits
    shared = {"weights": weights, "gradients": gradients, "states": states}
    moments = _peak_moments(memory, machine, _gathered_bytes(processes, machine, run.graph, single, largest), logits)
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    return PerProcess(
        processes=processes,
        shard=shard,
        **shared,
        **fullest,
        evaluation=evaluated if run.config.eval is not None else 0,
        sent=round(steps * (gathers + copied)),
        copied=round(steps * copied),
        flops=steps * (memory.flops + _flops_again(memory, machine)),
    )


def _gathered_bytes(processes: int, machine: MachineConfig, graph: Graph, single: int, largest: int) -> tuple[int, int]:
    """Return the bytes of full weights and gradients in the loss, and in the backward pass of a layer."""
    if processes == 1:  # the gradients of a chunk and of a layer, until they are added to the gradients of the step
        return 2 * NUMBER * _largest_head_size(graph), NUMBER * (_largest_head_size(graph) + largest)
    # Of a layer: its weights, its gradients and a copy to send, and the next weights.
    layer = 3 * NUMBER if machine.gather == "float32" else 2 * 2 + 6
    # In the loss the weights, the head's gradient, and the part of a chunk; then the gradient of the head.
    return 2 * NUMBER * single, NUMBER * (single + _largest_head_size(graph)) + layer * largest


def _peak_moments(
    memory: StepMemory, machine: MachineConfig, gathered: tuple[int, int], logits: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the parts that vary, at the two possible moments of peak memory: the loss, and a layer's backward pass."""
    inside = machine.gather == "float32"  # else the weights of layers arrive in bfloat16
    again = _recomputed_layers(memory, machine)
    products = machine.recompute == "selective"
    rerun = [memory.layers[path].kept - products * memory.layers[path].products for path in again]
    saved = memory.activations - sum(
        layer.freed - products * layer.products for path, layer in memory.layers.items() if path in again
    )
    casts = {path: inside * layer.casts for path, layer in memory.layers.items()}
    loss = {
        "gathered": gathered[0],
        "activations": saved,
        "casts": memory.casts + sum(casts.values()),  # autocast keeps them until then, recomputed layers or not
        "logits": 3 * logits,
    }
    saved_casts = sum(size for path, size in casts.items() if path not in again)
    backward = {
        "gathered": gathered[1],
        "activations": saved + max(rerun, default=0),
        "casts": saved_casts + max((casts[path] for path in again), default=0),
        "logits": 0,
    }
    return loss, backward


def _recomputed_layers(memory: StepMemory, machine: MachineConfig) -> set[str]:
    """Return the paths of the layers that the backward pass recomputes."""
    return {path for path in memory.layers if machine.recomputes(int(path.rpartition(".")[2]))}


def _flops_again(memory: StepMemory, machine: MachineConfig) -> int:
    """Return the FLOPs of recomputed layers; with `selective`, the results of all matrix products are saved."""
    again = set[str]() if machine.recompute == "selective" else _recomputed_layers(memory, machine)
    return sum(memory.layers[path].forward for path in again)


def _largest_head_size(graph: Graph) -> int:
    """Return the number of weights of the largest head."""
    widths = [node.output.width or 0 for node in graph.nodes if node.stack is not None]
    heads = [node.output.width or 0 for node in graph.nodes if node.output.type == "logits"]
    return max(heads, default=0) * max(widths, default=0)


def _layer_sizes(run: Run, memory: StepMemory) -> list[int]:
    """Return the number of parameters of each layer that is gathered separately."""
    stacks = [(node.name, node.stack) for node in run.graph.nodes if node.stack is not None and not node.stack.repeated]
    return [memory.layers[f"{name}.layers.{i}"].parameters for name, stack in stacks for i in range(len(stack.layers))]


@dataclass(frozen=True)
class LeastTime:
    """Minimum seconds of a step, if processes compute and communicate in parallel, at the limits of their devices.

    Attributes:
        compute: seconds of all FLOPs.
        machine: seconds of what a process sends inside its machine.
        network: seconds of what it sends to other machines.
    """

    compute: float
    machine: float
    network: float

    @property
    def seconds(self) -> float:
        """The maximum of the three times."""
        return max(vars(self).values())

    @property
    def bound(self) -> str:
        """The name of the longest time."""
        return max(vars(self), key=vars(self).__getitem__)

    @property
    def usual(self) -> float:
        """Seconds of a step whose FLOPs reach a usual fraction of the peak."""
        return max(self.compute / USUAL_FRACTION, self.machine, self.network)


def least_time(needs: PerProcess, precision: str, device: Device, network: float) -> LeastTime | None:
    """Return the minimum time of a step on machines with eight devices; None for a device without `interconnect`.

    Each device has a network adapter of `network` bytes per second in one direction. Bytes pass from process to process
    in rings. The ring of a group that is larger than a machine enters each machine once, and the adapters divide its
    bytes among them: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.

    Raises ValueError if the device cannot compute in `precision`.
    """
    if device.interconnect is None:
        return None
    gathered, shard = needs.sent - needs.copied, needs.shard
    entering = gathered * (shard > DEVICES) + needs.copied * min(shard, DEVICES)
    return LeastTime(
        compute=needs.flops / device.flops(precision),
        machine=(gathered + needs.copied * (shard < DEVICES)) / device.interconnect,
        network=entering / DEVICES / network if needs.processes > DEVICES else 0.0,
    )


def fitting_changes(run: Run, processes: int, optimizer: Optimizer, device: Device, network: float) -> str | None:
    """Return changes of `machine` with which a process fits a device; None if no changes suffice.

    The changes affect results only by rounding. Of all sufficient changes, these have the minimum time of a step.
    """
    rounded = [("gather", "bfloat16")] if run.config.precision == "bfloat16" and processes > 1 else []
    candidates: list[tuple[str, Any]] = [
        *(*rounded, ("recompute", "selective"), ("micro_batch", 1), ("recompute", "full"), ("shard", None))
    ]
    candidates = [change for change in candidates if getattr(run.config.machine, change[0]) != change[1]]
    counted: dict[int, StepMemory] = {}
    best: dict[float, dict[str, Any]] = {}
    # Of equally fast sets the first: each change costs more than all before it together, so that bits count sets up.
    for bits in range(1, 2 ** len(candidates)):
        chosen = dict(change for index, change in enumerate(candidates) if bits >> index & 1)
        needs = per_process(run, processes, optimizer, run.config.machine.model_copy(update=chosen), counted)
        if needs.peak <= device.memory:
            time = least_time(needs, run.config.fastest, device, network)
            best.setdefault(time.seconds if time else 0.0, chosen)
    return _changes_text(best[min(best)]) if best else None


def _changes_text(changes: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name}: {'null' if value is None else value}" for name, value in changes.items())
    return f"machine: {{{text}}}"


REMEDIES = {
    "gathered": ("gathered weights", "use narrower layers or a smaller vocabulary"),
    "activations": ("the activations of one sequence", "use shorter examples"),
    "casts": ("casts of weights", "use narrower layers"),
    "logits": ("the logits of a chunk", "use a smaller vocabulary"),
}
"""The parts that do not depend on the number of processes, as nouns, and what makes each smaller."""


def fitting_count(run: Run, processes: int, optimizer: Optimizer, device: Device) -> str:
    """Return how many processes fit a device that no changes of `machine` suffice for, or what else helps.

    More processes divide weights, gradients and states. The remaining parts of a process do not depend on their number.
    """
    changes: dict[str, Any] = {"recompute": "full", "micro_batch": 1, "shard": None}
    counts = [processes]
    while not run.config.loss.undivided and not any(size % (counts[-1] * 2) for size in run.sizes.values):
        counts.append(counts[-1] * 2)
    if run.config.precision == "bfloat16" and counts[-1] > 1:
        changes["gather"] = "bfloat16"
    machine, counted = run.config.machine.model_copy(update=changes), dict[int, StepMemory]()
    for count in counts[1:]:
        if per_process(run, count, optimizer, machine, counted).peak <= device.memory:
            return f"use {count:,} processes, and {_changes_text(changes)}"
    needs = per_process(run, counts[-1], optimizer, machine, counted)
    divided = needs.weights + needs.gradients + needs.states
    rest = needs.peak - divided
    if rest < device.memory:
        count = -(-divided * needs.processes // (device.memory - rest))
        return f"use about {count:,} processes, {_changes_text(changes)}, and at least as many sequences in a batch"
    part = max(REMEDIES, key=needs.parts.__getitem__)
    noun, remedy = REMEDIES[part]
    return f"no number of processes suffices, because {noun} need {bytes_text(needs.parts[part])} in each; {remedy}"

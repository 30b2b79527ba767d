"""The memory that each of several processes needs for a run, by what it is for, and what would make it fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfkit.component.stack import Layers
from tfkit.run.checked_run import Run
from tfkit.run.run_spec import MachineConfig
from tfkit.run.training.chunked_loss import count_pieces
from tfkit.run.training.processes import check_count
from tfkit.tools.common.modes import Optimizer
from tfkit.tools.cost.cost import Cost, cost

NUMBER = 4
"""Bytes of a number in float32, the type of weights, gradients and states."""


@dataclass(frozen=True)
class PerProcess:
    """Predicted bytes of one process of several, in a step with several micro-batches.

    Attributes:
        processes: their number.
        shard: processes that share one copy of the weights.
        weights: the part of the weights.
        gradients: the part of the gradients.
        states: the part of the optimizer's states.
        gathered: complete weights and gradients: of everything that is in no layer, and of a layer; and the weights
            of the next layer.
        activations: activations that are kept for the backward, with `machine.recompute`.
        casts: weights in bfloat16 that are kept for the backward, because they were gathered in float32.
        logits: logits of a chunk of the loss, with their gradients.
        evaluation: all that is in memory in an evaluation, which runs layer by layer between two steps; 0 without one.
        sent: bytes that the process receives and sends in a step.
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

    @property
    def parts(self) -> dict[str, int]:
        """The bytes by their purpose."""
        names = ("weights", "gradients", "states", "gathered", "activations", "casts", "logits")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    @property
    def peak(self) -> int:
        """The bytes that must fit: of a step, or of an evaluation."""
        return max(self.total, self.evaluation)


def per_process(
    run: Run,
    processes: int,
    optimizer: Optimizer,
    machine: MachineConfig | None = None,
    counted: dict[int, Cost] | None = None,
) -> PerProcess:
    """Return the memory of each of `processes` processes, with the run's machine by default.

    `counted` has the costs of micro-batches by their size; the costs that are missing are added.

    Raises SpecError if that many cannot train the run.
    """
    check_count(run, processes)
    machine = machine or run.config.machine
    sequences = run.config.batch.sequences // processes
    size = machine.micro_batch
    micro, shard = min(size if isinstance(size, int) else sequences, sequences), machine.shard or processes
    bfloat16 = run.config.precision == "bfloat16"
    counted = {} if counted is None else counted
    if micro not in counted:
        precision = run.config.precision
        counted[micro] = cost(run.graph, batch=micro, length=run.data.length, dtype=precision, optimizer=optimizer)
    costs = counted[micro]
    layers, single = _sizes(run, costs)
    largest, total = max(layers, default=0), costs.total.parameters
    sent = NUMBER if machine.gather == "float32" else 2
    rows = micro * run.data.length
    vocabulary = max((node.output.width or 0 for node in run.graph.nodes if node.output.type == "logits"), default=0)
    states = NUMBER * total * costs.memory.optimizer // max(costs.memory.weights, 1)
    steps = -(-sequences // micro)
    gathers = (shard - 1) / shard * (2 * sent * sum(layers) + NUMBER * single + NUMBER * total)
    copies = processes // shard
    weights, states = -(-NUMBER * total // shard), -(-states // shard)
    logits = NUMBER * vocabulary * -(-rows // count_pieces(rows, vocabulary)) if vocabulary else 0
    layer = costs.memory.activations // max(sum(len(stack.layers) for stack in _stacks(run)), 1)
    evaluated = 2 * weights + states + NUMBER * single + 2 * sent * largest + layer + 2 * logits
    return PerProcess(
        processes=processes,
        shard=shard,
        weights=weights,
        gradients=weights,
        states=states,
        gathered=2 * NUMBER * single + 3 * sent * largest,
        activations=_activations(run, costs, rows, machine, bfloat16=bfloat16),
        casts=2 * total if bfloat16 and sent == NUMBER and machine.recompute in ("none", "selective") else 0,
        logits=3 * logits,
        evaluation=evaluated if run.config.eval is not None else 0,
        sent=round(steps * (gathers + 2 * (copies - 1) / copies * NUMBER * total / shard)),
    )


def _sizes(run: Run, costs: Cost) -> tuple[list[int], int]:
    """Return the weights of each layer that is gathered alone, and the number of all other weights."""
    alone = {
        f"{node.name}.layers.{number}"
        for node in run.graph.nodes
        if node.stack is not None and node.stack.repeats == 1
        for number in range(len(node.stack.layers))
    }
    layers: dict[str, int] = {}
    for part in costs.parts:
        if part.layer in alone:
            layers[part.layer] = layers.get(part.layer, 0) + part.parameters
    return list(layers.values()), costs.total.parameters - sum(layers.values())


def _activations(run: Run, costs: Cost, rows: int, machine: MachineConfig, *, bfloat16: bool) -> int:
    """Return the bytes that are kept for the backward. Under autocast, the inputs of norms stay float32."""
    stacks = _stacks(run)
    normed = sum(len(layer.steps) for stack in stacks for layer in stack.layers)
    width = max((node.output.width or 0 for node in run.graph.nodes if node.stack is not None), default=0)
    full = costs.memory.activations + (2 * rows * width * normed if bfloat16 else 0)
    recomputed = [machine.recomputes(number) for stack in stacks for number in range(len(stack.layers))]
    if not any(recomputed):
        return full
    again = costs.memory.activations_recomputed + (2 * rows * width * len(recomputed) if bfloat16 else 0)
    # `selective` keeps the results of matrix products and of attention: about half of what a layer keeps.
    fraction = 0.5 if machine.recompute == "selective" else sum(recomputed) / len(recomputed)
    return round(full - fraction * (full - again))


def _stacks(run: Run) -> list[Layers]:
    return [node.stack for node in run.graph.nodes if node.stack is not None]


def fitting(run: Run, processes: int, optimizer: Optimizer, limit: int) -> str | None:
    """Return the cheapest changes of `machine` with which a process fits a number of bytes; None if none suffices.

    They change no number beyond rounding.
    """
    rounded = {"gather": "bfloat16"} if run.config.precision == "bfloat16" else {}
    values: dict[str, Any] = {**rounded, "micro_batch": 1, "recompute": "full", "shard": None}
    values = {name: value for name, value in values.items() if getattr(run.config.machine, name) != value}
    counted: dict[int, Cost] = {}
    # Each costs more than all before it together: the bits of a number that counts up are the cheapest sets, in order.
    for bits in range(1, 2 ** len(values)):
        chosen = {name: value for place, (name, value) in enumerate(values.items()) if bits >> place & 1}
        machine = run.config.machine.model_copy(update=chosen)
        if per_process(run, processes, optimizer, machine, counted).peak <= limit:
            text = ", ".join(f"{name}: {'null' if value is None else value}" for name, value in chosen.items())
            return f"machine: {{{text}}}"
    return None

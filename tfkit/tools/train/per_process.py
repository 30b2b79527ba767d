"""The memory that each of several processes needs for a run, by what it is for, and what would make it fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfkit.graph.expand import Graph
from tfkit.run.checked_run import Run
from tfkit.run.run_spec import MachineConfig
from tfkit.run.training.chunked_loss import count_pieces
from tfkit.run.training.processes import check_count
from tfkit.tools.common.modes import Optimizer
from tfkit.tools.cost.cost import bytes_of_states
from tfkit.tools.cost.step_memory import StepMemory, memory_of_step

NUMBER = 4
"""Bytes of a number in float32, the type of weights, gradients and states."""


@dataclass(frozen=True)
class PerProcess:
    """Predicted bytes of one process of several, in a step with several micro-batches, when most are in use.

    That is in the loss, where all logits of a chunk exist, or in the backward of a layer.

    Attributes:
        processes: their number.
        shard: processes that share one copy of the weights.
        weights: the part of the weights.
        gradients: the part of the gradients.
        states: the part of the optimizer's states.
        gathered: complete weights and gradients, of what is in no layer, and in the backward of a layer.
        activations: activations that are kept for the backward, and of a layer that runs again.
        casts: weights in bfloat16 that autocast keeps, because they were gathered in float32.
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
    counted: dict[int, StepMemory] | None = None,
) -> PerProcess:
    """Return the memory of each of `processes` processes, with the run's machine by default.

    `counted` has the steps of micro-batches by their size; the steps that are missing are added.

    Raises SpecError if that many cannot train the run.
    """
    check_count(run, processes)
    machine = machine or run.config.machine
    sequences = run.config.batch.sequences // processes
    size = machine.micro_batch
    micro, shard = min(size if isinstance(size, int) else sequences, sequences), machine.shard or processes
    counted = {} if counted is None else counted
    if micro not in counted:
        bfloat16 = run.config.precision == "bfloat16"
        counted[micro] = memory_of_step(run.graph, micro, run.data.length, bfloat16=bfloat16)
    memory, total = counted[micro], counted[micro].parameters
    layers = _sizes(run, memory)
    largest, single = max(layers, default=0), total - sum(layers)
    sent = NUMBER if machine.gather == "float32" else 2
    rows = micro * run.data.length
    vocabulary = max((node.output.width or 0 for node in run.graph.nodes if node.output.type == "logits"), default=0)
    steps = -(-sequences // micro)
    gathers = (shard - 1) / shard * (2 * sent * sum(layers) + NUMBER * single + NUMBER * total)
    copies = processes // shard
    weights, states = -(-NUMBER * total // shard), -(-bytes_of_states(optimizer, NUMBER) * total // shard)
    logits = NUMBER * vocabulary * -(-rows // count_pieces(rows, vocabulary)) if vocabulary else 0
    layer = max((layer.kept for layer in memory.layers.values()), default=memory.activations)
    evaluated = 2 * weights + states + NUMBER * single + 2 * sent * largest + layer + 2 * logits
    shared = {"weights": weights, "gradients": weights, "states": states}
    moments = _moments(memory, machine, run.graph, single, largest, logits)
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    return PerProcess(
        processes=processes,
        shard=shard,
        **shared,
        **fullest,
        evaluation=evaluated if run.config.eval is not None else 0,
        sent=round(steps * (gathers + 2 * (copies - 1) / copies * NUMBER * total / shard)),
    )


def _moments(
    memory: StepMemory, machine: MachineConfig, graph: Graph, single: int, largest: int, logits: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the parts that vary at the two moments that can be the fullest: the loss, and the backward of a layer."""
    sent = NUMBER if machine.gather == "float32" else 2
    inside = sent == NUMBER  # else the weights of layers arrive in bfloat16
    again = {path for path in memory.layers if machine.recomputes(int(path.rpartition(".")[2]))}
    products = machine.recompute == "selective"
    rerun = [memory.layers[path].kept - products * memory.layers[path].products for path in again]
    kept = memory.activations - sum(
        layer.freed - products * layer.products for path, layer in memory.layers.items() if path in again
    )
    casts = {path: inside * layer.casts for path, layer in memory.layers.items()}
    loss = {
        "gathered": 2 * NUMBER * single,  # the weights, the head's gradient, and the part of a chunk
        "activations": kept,
        "casts": memory.casts + sum(casts.values()),  # autocast keeps them until then, recomputed layers or not
        "logits": 3 * logits,
    }
    kept_casts = sum(size for path, size in casts.items() if path not in again)
    backward = {
        # The gradient of the head; of the layer, its weights, its gradients and a copy to send, and the next weights.
        "gathered": NUMBER * (single + _head(graph)) + (2 * sent + (sent if inside else 6)) * largest,
        "activations": kept + max(rerun, default=0),
        "casts": kept_casts + max((casts[path] for path in again), default=0),
        "logits": 0,
    }
    return loss, backward


def _head(graph: Graph) -> int:
    """Return the number of weights of the largest head."""
    widths = [node.output.width or 0 for node in graph.nodes if node.stack is not None]
    heads = [node.output.width or 0 for node in graph.nodes if node.output.type == "logits"]
    return max(heads, default=0) * max(widths, default=0)


def _sizes(run: Run, memory: StepMemory) -> list[int]:
    """Return the parameters of each layer that is gathered alone."""
    stacks = [(node.name, node.stack) for node in run.graph.nodes if node.stack is not None and node.stack.repeats == 1]
    return [memory.layers[f"{name}.layers.{i}"].parameters for name, stack in stacks for i in range(len(stack.layers))]


def fitting(run: Run, processes: int, optimizer: Optimizer, limit: int) -> str | None:
    """Return the cheapest changes of `machine` with which a process fits a number of bytes; None if none suffices.

    They change no number beyond rounding.
    """
    rounded = {"gather": "bfloat16"} if run.config.precision == "bfloat16" else {}
    values: dict[str, Any] = {**rounded, "micro_batch": 1, "recompute": "full", "shard": None}
    values = {name: value for name, value in values.items() if getattr(run.config.machine, name) != value}
    counted: dict[int, StepMemory] = {}
    # Each costs more than all before it together: the bits of a number that counts up are the cheapest sets, in order.
    for bits in range(1, 2 ** len(values)):
        chosen = {name: value for place, (name, value) in enumerate(values.items()) if bits >> place & 1}
        machine = run.config.machine.model_copy(update=chosen)
        if per_process(run, processes, optimizer, machine, counted).peak <= limit:
            text = ", ".join(f"{name}: {'null' if value is None else value}" for name, value in chosen.items())
            return f"machine: {{{text}}}"
    return None

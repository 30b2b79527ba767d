"""The budget of a model: parameters, active parameters, FLOPs or memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import torch

from tfkit.arguments import Limit, Positive, checked
from tfkit.builder import build
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import max_len
from tfkit.placement import AnyDtype, dtype_of
from tfkit.tools.common.choices import LENGTH, NEEDS, Budgeted, Mode, Optimizer
from tfkit.tools.common.units import bytes_text
from tfkit.tools.params.count import active_of

if TYPE_CHECKING:
    from tfkit.tools.cost.result import Cost


class Measured(NamedTuple):
    """The costs of a model as its budget counts them, and its parameters."""

    value: int
    parameters: int


Amount: TypeAlias = Annotated[float, Limit(above=0)]


@checked
@dataclass(frozen=True)
class Budget:
    """An amount of parameters, FLOPs or bytes.

    Attributes:
        of: the quantity; `active` parameters are those that one token is multiplied by.
        amount: its amount.
        mode: FLOPs and memory of a training step, of reading a prompt, or of one more token.
        tokens: number of tokens for FLOPs.
        batch: sequences at once; only memory depends on it.
        length: tokens of each sequence; unless given, 2048, or the model's `max_len` if that is less.
        dtype: type of weights and activations, which memory depends on.
        optimizer: the optimizer whose states are in memory, one of `OPTIMIZERS`.
        recompute: True if layers run again in the backward, and keep less.
    """

    of: Budgeted
    amount: Amount
    mode: Mode = "train"
    tokens: Amount = 1
    batch: Positive = 1
    length: Positive | None = None
    dtype: AnyDtype = torch.bfloat16
    optimizer: Optimizer = "adamw"
    recompute: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_of(self.dtype))
        defaults = {field.name: field.default for field in fields(self)}
        changed = [name for name in NEEDS if getattr(self, name) != defaults[name]]
        for name in changed:
            if self.of not in NEEDS[name]:
                raise ValueError(f"`{name}` has no effect on a budget of {self.of}: omit it")
            if name in ("optimizer", "recompute") and self.mode != "train":
                raise ValueError(f"`{name}` has no effect without a backward: omit it, or use mode='train'")

    @property
    def at_most(self) -> bool:
        """True if nothing may exceed it: memory is a limit, parameters and FLOPs are a target."""
        return self.of == "memory"

    def at_length(self, graph: Graph) -> int:
        """Return the sequence length for a model."""
        return self.length or min(LENGTH, max_len(graph) or LENGTH)

    def measure(self, graph: Graph) -> Measured:
        """Measure a model: parameters, the FLOPs of one sequence, or the bytes of the full batch."""
        if self.of in ("params", "active"):
            count, active = parameters_of(graph)
            return Measured(active if self.of == "active" else count, count)
        costs = self.cost(graph)
        total = costs.total
        return Measured(total.flops if self.of == "flops" else costs.peak, total.parameters)

    def cost(self, graph: Graph) -> Cost:
        """Return the costs of a step of a model."""
        from tfkit.tools.cost.count import cost

        batch = self.batch if self.of == "memory" else 1
        return cost(
            graph,
            batch=batch,
            length=self.at_length(graph),
            mode=self.mode,
            dtype=self.dtype,
            optimizer=self.optimizer if self.mode == "train" else None,
            recompute=self.recompute,
        )

    def factor(self, graph: Graph) -> float:
        """Return the factor between `measure` and the amount: tokens in sequences."""
        if self.of != "flops":
            return 1
        return self.tokens / (1 if self.mode == "decode" else self.at_length(graph))

    def text(self, value: float) -> str:
        """Format a value."""
        if self.of == "memory":
            return bytes_text(round(value))
        if self.of == "flops":
            return f"{value:.4g} FLOPs"
        return f"{round(value):,} {'active parameters' if self.of == 'active' else 'parameters'}"


def parameters_of(graph: Graph) -> tuple[int, int]:
    """Count all and active parameters of a model on the meta device."""
    model: Any = build(graph, device="meta")
    modules: dict[str, Any] = dict(model.named_modules())
    weights = dict(model.named_parameters()).items()
    active = sum(active_of(modules[path.rpartition(".")[0]], weight) for path, weight in weights)
    return sum(weight.numel() for _, weight in weights), active

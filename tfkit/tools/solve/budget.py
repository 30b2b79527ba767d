"""The budgets that a spec is solved for, parameters or memory, and the sizes that fit them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tfkit.arguments import Limit, checked
from tfkit.building.builder import build
from tfkit.commands import bytes_text
from tfkit.component import AttentionConfig, FFNConfig, Layers
from tfkit.graph.expand import Graph
from tfkit.tools.params.count import active_of


@checked
@dataclass(frozen=True)
class Budget:
    """A number of parameters.

    Attributes:
        of: the quantity; `active` counts the parameters that one token uses.
        amount: the number of parameters.
    """

    of: Literal["params", "active"]
    amount: Annotated[float, Limit(above=0)]

    def count(self, graph: Graph) -> int:
        """Count the parameters of a model that the budget limits."""
        total, active = parameters_of(graph)
        return active if self.of == "active" else total

    def text(self, count: float) -> str:
        """Format a number of parameters."""
        return f"{round(count):,} {'active parameters' if self.of == 'active' else 'parameters'}"


@dataclass(frozen=True)
class Memory:
    """The memory of each process of a run.

    Attributes:
        amount: bytes.
        processes: the number of processes.
    """

    amount: float
    processes: int
    of: Literal["memory"] = "memory"

    def text(self, count: float) -> str:
        """Format a number of bytes."""
        return bytes_text(round(count))


def parameters_of(graph: Graph) -> tuple[int, int]:
    """Count all and active parameters of a model on the meta device."""
    model: Any = build(graph, device="meta")
    modules: dict[str, Any] = dict(model.named_modules())
    weights = dict(model.named_parameters()).items()
    active = sum(active_of(modules[path.rpartition(".")[0]], weight) for path, weight in weights)
    return sum(weight.numel() for _, weight in weights), active


@dataclass(frozen=True)
class Size:
    """A size of the family, counted from the model that it builds.

    Attributes:
        n_layers: the number of layers of each stack, by node.
        d_model: the width of the first stack.
        n_heads: query heads of the first stack; None without attention.
        n_kv_heads: heads of keys and values of the first stack.
        d_ff: hidden width of the first stack; None without an FFN.
        parameters: the exact number of parameters.
        value: the quantity that the budget limits.
        difference: `value` minus the budget.
        sets: the changes of the spec that give this size, as `--set` takes them.
    """

    n_layers: Mapping[str, int]
    d_model: int | None
    n_heads: int | None
    n_kv_heads: int | None
    d_ff: int | None
    parameters: int
    value: int
    difference: float
    sets: tuple[str, ...]


@dataclass(frozen=True)
class Solved:
    """The result of `solve`. The size with the spec's shape comes first."""

    name: str
    budget: Budget | Memory
    sizes: tuple[Size, ...]


def size_of_graph(graph: Graph, budget: Budget | Memory, sets: tuple[str, ...], peak: int = 0) -> Size:
    """Describe the size of a model, which the changes `sets` give, and whose processes need `peak` bytes."""
    parameters, active = parameters_of(graph)
    value = {"params": parameters, "active": active, "memory": peak}[budget.of]
    stacks = [(node, node.stack) for node in graph.nodes if node.stack is not None]
    attention, ffn = _usual_configs(stacks[0][1]) if stacks else (None, None)
    return Size(
        n_layers={node.name: stack.depth for node, stack in stacks},
        d_model=stacks[0][0].output.width if stacks else None,
        n_heads=attention.n_heads if attention else None,
        n_kv_heads=attention.kv_heads if attention else None,
        d_ff=ffn.hidden_width if ffn else None,
        parameters=parameters,
        value=value,
        difference=value - budget.amount,
        sets=sets,
    )


def _usual_configs(stack: Layers) -> tuple[AttentionConfig | None, FFNConfig | None]:
    """Return the self-attention and the FFN of most layers of a stack."""
    steps = stack.layers[max(stack.variants.values(), key=len)[0]].steps
    attention = (step.config for step in steps if isinstance(step.config, AttentionConfig) and not step.reads_memory)
    ffn = (step.config for step in steps if isinstance(step.config, FFNConfig))
    return next(attention, None), next(ffn, None)

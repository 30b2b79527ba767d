"""The parameters of a model by component, counted exactly, on the built module on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from tfkit.arguments import checked
from tfkit.building.builder import build, graph_of
from tfkit.graph.expand import AnySpec, Graph, as_graph
from tfkit.graph.wiring import table_owner
from tfkit.nn import StackedLinear
from tfkit.tools.common.memory_needs import CacheSize, cache_size
from tfkit.tools.common.ownership import Ownership, in_rows, owners_of
from tfkit.tools.common.pages import html_table

By = Literal["component", "node", "layer", "module"]


@dataclass(frozen=True)
class ParameterRow:
    """A row of the count. `non_embedding` is its count without embedding tables."""

    name: str
    label: str
    parameters: int
    non_embedding: int


@dataclass(frozen=True)
class Params:
    """The parameters of a model; `rows` add up to `total`. A weight that is used twice is counted once."""

    name: str
    by: By
    rows: tuple[ParameterRow, ...]
    total: int
    non_embedding: int
    trainable: int
    active: int
    """Parameters by which a token is multiplied: of routed experts, only the chosen experts count."""
    buffers: int
    notes: tuple[str, ...]
    """Notes about tied or shared weights."""
    cache: CacheSize | None
    """The cache of one sequence."""

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        total = ParameterRow("total", "total", self.total, self.non_embedding)
        rows = [(row.label, f"{row.parameters:,}", f"{row.non_embedding:,}") for row in (*self.rows, total)]
        return html_table(self.name, (self.by, "parameters", "non-embedding"), rows)


@dataclass(frozen=True)
class _Weight(Ownership):
    """One parameter of the model, and its owner."""

    module: str
    count: int
    active: int
    trainable: bool
    embedding: bool


@checked
def count_params(graph: AnySpec, by: By = "component") -> Params:
    """Count the parameters of a model or spec, without memory for them.

        params = tfkit.count_params("gpt2", by="layer")
        params.total                                          # 124,439,808
        {row.name: row.parameters for row in params.rows}

    A parameter belongs to the nearest component around it: the slot of that component, the block's name for a node, or
    `head` for a node that returns logits. The embedding tables belong to embedding nodes, including positions.

    Args:
        graph: the name, path or mapping of a spec, or the result of `load`.
        by: the rows: a row for each component, node, layer or module.

    Raises:
        SpecError: the spec has errors, or the model cannot be built.
    """
    return count_modules(build(as_graph(graph), device="meta"), by)


def count_modules(model: Any, by: By) -> Params:
    """Count the parameters of a built model, as `count_params` does."""
    graph = graph_of(model)
    weights = _weights(model, graph)
    return Params(
        name=graph.name,
        by=by,
        rows=tuple(
            ParameterRow(
                name,
                label,
                sum(weight.count for weight in owned),
                sum(weight.count for weight in owned if not weight.embedding),
            )
            for name, label, owned in in_rows(weights, by)
        ),
        total=sum(weight.count for weight in weights),
        non_embedding=sum(weight.count for weight in weights if not weight.embedding),
        trainable=sum(weight.count for weight in weights if weight.trainable),
        active=sum(weight.active for weight in weights),
        buffers=sum(buffer.numel() for buffer in model.buffers()),
        notes=(*_tied(graph, model), *_repeated(graph)),
        cache=cache_size(graph),
    )


def active_of(module: nn.Module, weight: Tensor) -> int:
    """Return the number of values of a weight by which a token is multiplied; of experts, only the chosen experts."""
    if isinstance(module, StackedLinear) and module.per_token is not None:
        return weight.numel() // module.weight.size(0) * module.per_token
    return weight.numel()


def _weights(model: Any, graph: Graph) -> list[_Weight]:
    modules, parts = dict(model.named_modules()), owners_of(model)
    tables = {node.name for node in graph.nodes if node.config.table() is not None}
    weights = []
    for path, parameter in model.named_parameters():
        module = path.rpartition(".")[0]
        embedding = parts[module].node in tables and isinstance(modules[module], nn.Embedding)
        active = active_of(modules[module], parameter)
        weights.append(
            _Weight(
                **vars(parts[module]),
                module=module,
                count=parameter.numel(),
                active=active,
                trainable=parameter.requires_grad,
                embedding=embedding,
            )
        )
    return weights


def _tied(graph: Graph, model: Any) -> list[str]:
    users: dict[str, list[str]] = {}
    for node in graph.nodes:
        tie = node.wires.get("tie")
        if isinstance(tie, str):
            users.setdefault(table_owner(graph, tie), []).append(node.name)
    notes = []
    for owner, names in users.items():
        table = model.get_parameter(f"{owner}.tokens.weight")
        verb = "uses" if len(names) == 1 else "use"
        notes.append(f"tied: {' and '.join(names)} {verb} the table of {owner}, {table.numel():,} counted once")
    return notes


def _repeated(graph: Graph) -> Iterator[str]:
    """Describe stacks that run layers several times with the same weights."""
    for node in graph.nodes:
        if node.stack is not None and node.stack.repeats > 1:
            depth, sets = node.stack.depth, len(node.stack.layers)
            yield f"shared: {node.name} runs {depth} layers with the weights of {sets}, counted once"

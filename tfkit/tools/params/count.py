"""The parameters of a model by component, counted exactly, on the built module on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from tfkit.arguments import checked
from tfkit.building.builder import build, graph_of
from tfkit.building.edits import AnyModel, as_model, tensor_origins
from tfkit.graph.expand import Graph
from tfkit.graph.wiring import table_owner
from tfkit.nn import StackedLinear
from tfkit.tools.common.memory_needs import CacheSize, cache_size
from tfkit.tools.common.ownership import Ownership, added_owner, in_rows, owners_of
from tfkit.tools.common.pages import notebook_table

By = Literal["component", "node", "layer", "module"]


@dataclass(frozen=True)
class ParameterRow:
    """A row of the count. `non_embedding` is its count without embedding tables, `trainable` without frozen weights."""

    name: str
    label: str
    parameters: int
    non_embedding: int
    trainable: int


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
    """Notes about tied or shared weights, and the differences of an edited model from its spec."""
    cache: CacheSize | None
    """The cache of one sequence."""

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        total = ParameterRow("total", "total", self.total, self.non_embedding, self.trainable)
        rows = [(row.label, f"{row.parameters:,}", f"{row.non_embedding:,}") for row in (*self.rows, total)]
        return notebook_table(self.name, (self.by, "parameters", "non-embedding"), rows)


@dataclass(frozen=True)
class _Weight(Ownership):
    """One parameter of the model, and its owner."""

    module: str
    origin: str | None
    count: int
    active: int
    trainable: bool
    embedding: bool


@checked
def count_params(graph: AnyModel, by: By = "component") -> Params:
    """Count the parameters of a built model, or of the model of a spec, without memory for them.

        params = tfkit.count_params("gpt2", by="layer")
        params.total                                          # 124,439,808
        {row.name: row.parameters for row in params.rows}

    A parameter belongs to the nearest component around it: the slot of that component, the block's name for a node, or
    `head` for a node that returns logits. The embedding tables belong to embedding nodes, including positions.
    Parameters that were added to a built model, such as adapters, are the component `not in the spec`.

    Args:
        graph: the name, path or mapping of a spec, the result of `load`, or a built model in its current state.
        by: the rows: a row for each component, node, layer or module.

    Raises:
        SpecError: the spec has errors, or the model cannot be built.
    """
    model = as_model(graph, "its parameters are counted in the modules, its cache by the spec")
    return count_modules(model.module or build(model.graph, device="meta"), by, model.edits)


def count_modules(model: Any, by: By, edits: tuple[str, ...] = ()) -> Params:
    """Count the parameters of a built model, as `count_params` does. `edits` are its differences from its spec."""
    graph = graph_of(model)
    weights = _counted_weights(model, graph, tensor_origins(model) if edits else {})
    return Params(
        name=graph.name,
        by=by,
        rows=tuple(
            ParameterRow(
                name,
                label,
                sum(weight.count for weight in owned),
                sum(weight.count for weight in owned if not weight.embedding),
                sum(weight.count for weight in owned if weight.trainable),
            )
            for name, label, owned in in_rows(weights, by)
        ),
        total=sum(weight.count for weight in weights),
        non_embedding=sum(weight.count for weight in weights if not weight.embedding),
        trainable=sum(weight.count for weight in weights if weight.trainable),
        active=sum(weight.active for weight in weights),
        buffers=sum(buffer.numel() for buffer in model.buffers()),
        notes=(*_tie_notes(graph, weights), *_repetition_notes(graph), *(f"changed: {text}" for text in edits)),
        cache=cache_size(graph),
    )


def active_of(module: nn.Module, weight: Tensor) -> int:
    """Return the number of values of a weight by which a token is multiplied; of experts, only the chosen experts."""
    if isinstance(module, StackedLinear) and module.per_token is not None:
        return weight.numel() // module.weight.size(0) * module.per_token
    return weight.numel()


def _counted_weights(model: Any, graph: Graph, origins: Mapping[str, str | None]) -> list[_Weight]:
    """Return the parameters; `origins` holds their names in the spec, by default their names in the model."""
    modules = dict(model.named_modules())
    parts = owners_of(model, [name.rpartition(".")[0] for name in origins.values() if name])
    tables = {node.name for node in graph.nodes if node.config.table() is not None}
    weights = []
    for path, parameter in model.named_parameters():
        module, origin = path.rpartition(".")[0], origins.get(path, path)
        owner = added_owner(path) if origin is None else parts[origin.rpartition(".")[0]]
        holders = [modules.get((origin or path).rpartition(".")[0]), modules[module]]
        holder = next((item for item in holders if isinstance(item, nn.Embedding | StackedLinear)), modules[module])
        embedding = owner.node in tables and isinstance(holder, nn.Embedding)
        active = active_of(holder, parameter)
        weights.append(
            _Weight(
                **vars(owner),
                module=module,
                origin=origin,
                count=parameter.numel(),
                active=active,
                trainable=parameter.requires_grad,
                embedding=embedding,
            )
        )
    return weights


def _tie_notes(graph: Graph, weights: Iterable[_Weight]) -> list[str]:
    users: dict[str, list[str]] = {}
    for node in graph.nodes:
        tie = node.wires.get("tie")
        if isinstance(tie, str):
            users.setdefault(table_owner(graph, tie), []).append(node.name)
    counts = {weight.origin: weight.count for weight in weights}
    notes = []
    for owner, names in users.items():
        verb, count = "uses" if len(names) == 1 else "use", counts.get(f"{owner}.tokens.weight", 0)
        notes.append(f"tied: {' and '.join(names)} {verb} the table of {owner}, {count:,} counted once")
    return notes


def _repetition_notes(graph: Graph) -> Iterator[str]:
    """Describe nodes that call the module of another node, and stacks that run layers several times."""
    for node in graph.nodes:
        if node.module != node.name:
            yield f"shared: {node.name} uses the weights of {node.module}, counted once"
        if node.stack is not None and node.stack.repeated:
            depth, sets = node.stack.depth, len(node.stack.layers)
            yield f"shared: {node.name} runs {depth} layers with the weights of {sets}, counted once"

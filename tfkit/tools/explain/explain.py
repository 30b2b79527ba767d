"""A model in words, in the order in which data flows through it: each component, its sizes, and its costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tfkit.arguments import checked
from tfkit.component import Signal
from tfkit.graph.expand import AnySpec, Graph, Node, as_graph
from tfkit.graph.order import as_list
from tfkit.graph.sequence_limits import rows_of
from tfkit.graph.tables import table_owner
from tfkit.tools.common.cache import CacheSize, cache_size
from tfkit.tools.cost.count import cost
from tfkit.tools.cost.result import ComponentCost
from tfkit.tools.explain.explanation import Explanation, explain_component
from tfkit.tools.explain.stack import explain_stack


@dataclass(frozen=True)
class Explained:
    """A model for a person who sees it for the first time.

    Attributes:
        name: its name.
        description: its distinctive features, in its spec's words.
        source: the paper or the reference implementation that its spec names.
        parameters: parameters of the entire model, which the nodes and everything inside them add up to.
        active: of these, those that one token is multiplied by: of routed experts, the chosen ones.
        flops: FLOPs of one forward over `length` tokens, which the nodes add up to.
        length: tokens of that forward.
        inputs: the inputs, a sentence each.
        nodes: the nodes, in the order in which data flows.
        init: the initialization of the weights.
        cache: the KV cache of one sequence.
    """

    name: str
    description: str | None
    source: str | None
    parameters: int
    active: int
    flops: int
    length: int
    inputs: tuple[str, ...]
    nodes: tuple[Explanation, ...]
    init: Explanation
    cache: CacheSize | None


@checked
def explain(graph: AnySpec) -> Explained:
    """Explain a model or spec: every component in the words of its docstrings, with sizes and costs.

    FLOPs are counted for a forward over as many tokens as `cost` uses by default. Raises SpecError if the model cannot
    be built.
    """
    graph = as_graph(graph)
    costs_of_model = cost(graph)
    costs = {node.name: [part for part in costs_of_model.parts if part.node == node.name] for node in graph.nodes}
    nodes = tuple(_with_costs(_node(graph, node), costs[node.name]) for node in graph.nodes)
    spec, total = graph.spec.model, costs_of_model.total
    return Explained(
        name=graph.name,
        description=spec.description,
        source=spec.source,
        parameters=total.parameters,
        active=total.active_parameters,
        flops=total.flops_forward,
        length=costs_of_model.length,
        inputs=tuple(_input(graph, name, signal) for name, signal in graph.inputs.items()),
        nodes=nodes,
        init=explain_component("init", spec.init),
        cache=cache_size(graph),
    )


def _input(graph: Graph, name: str, signal: Signal) -> str:
    """Describe an input."""
    what = {"tokens": "token ids", "sequence": "vectors", "lengths": "a length for each sequence"}[signal.type]
    rows = rows_of(graph, name) if signal.type == "tokens" else None
    what += f" below {rows:,}" if rows else f" of width {signal.width:,}" if signal.width else ""
    what += f", always {signal.length:,} positions" if signal.length else ""
    return f"{name}: {what}{', optional' if signal.optional else ''}"


def _node(graph: Graph, node: Node) -> Explanation:
    """Describe a node."""
    if node.stack is not None:
        part = explain_stack(node, node.stack)
    else:
        part = explain_component(
            node.name, node.config, facts=tuple(_facts(graph, node)), leave_out=frozenset({"vocab_size"})
        )
    reads = [name for field, source in node.wires.items() if field != "tie" for name in as_list(source)]
    return replace(part, where=f"reads {' and '.join(dict.fromkeys(reads))}")


def _facts(graph: Graph, node: Node) -> Iterator[str]:
    """Describe the sizes of a node that is not a stack, and the owner of its table."""
    table = node.config.table()
    tie = node.wires.get("tie")
    if table is not None and table.rows and table.width:
        yield f"a table of {table.rows:,} rows of width {table.width:,}"
    if node.output.type == "logits" and node.output.width:
        yield f"{node.output.width:,} logits"
    if isinstance(tie, str):
        yield f"tied: it uses the table of {table_owner(graph, tie)} and has none of its own"


def _with_costs(part: Explanation, costs: list[ComponentCost]) -> Explanation:
    """Add costs to the components of a node; the remainder belongs to the node itself."""
    left = list(costs)

    def claimed(component: Explanation, layers: tuple[int, ...]) -> Explanation:
        layers = component.layers or layers
        mine = (
            []
            if component is part
            else [cell for cell in left if cell.component == component.name and _in(cell, layers)]
        )
        for cell in mine:
            left.remove(cell)
        inside = tuple(claimed(inner, layers) for inner in component.parts)
        return replace(component, parameters=_parameters(mine), flops=_flops(mine), parts=inside)

    whole = claimed(part, ())
    return replace(whole, parameters=_parameters(left), flops=_flops(left))


_LAYER = re.compile(r"\blayers\.(\d+)")


def _in(cell: ComponentCost, layers: tuple[int, ...]) -> bool:
    """Return True if the module of a cost is in one of `layers`, or `layers` is empty."""
    match = _LAYER.search(cell.layer)
    return not layers or match is None or int(match[1]) in layers


def _parameters(costs: list[ComponentCost]) -> int:
    return sum(cell.parameters for cell in costs)


def _flops(costs: list[ComponentCost]) -> int:
    return sum(cell.flops_forward for cell in costs)

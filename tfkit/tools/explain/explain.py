"""A description of a model in the order of the data flow: nodes, stacks of layers, components, sizes and costs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tfkit.arguments import checked
from tfkit.component import AttentionConfig, Component, Config, Layer, Layers, MixerConfig, Signal
from tfkit.errors import ranges
from tfkit.graph.expand import AnySpec, Graph, Node, as_graph
from tfkit.graph.order import as_list
from tfkit.graph.sequence_limits import rows_of
from tfkit.graph.tables import table_owner
from tfkit.tools.common.cache import CacheSize, cache_size
from tfkit.tools.common.ownership import rank
from tfkit.tools.cost.count import cost
from tfkit.tools.cost.result import ComponentCost
from tfkit.tools.explain.explanation import (
    Explanation,
    differing,
    doc_of,
    explain_attention,
    explain_component,
    explain_mixer,
    field_papers,
    many,
    papers_of,
)
from tfkit.tools.show.steps import as_sentences


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


FEW = 28
"""The longest list of layers, in letters, that is written out; a pattern may have twice as many."""


def explain_stack(node: Node, stack: Layers) -> Explanation:
    """Describe a stack of layers."""
    component = explain_component(node.name, node.config, leave_out=stack.described)
    roles = dict.fromkeys(step.role for layer in stack.layers for step in layer.steps)
    parts = [part for role in sorted(roles, key=rank) for part in _parts(role, stack)]
    return Explanation(
        node.name,
        node.config.kind_name(),
        says=doc_of(node.config),
        papers=papers_of(node.config),
        facts=(_size(node, stack), *_sharing(node.config, stack), *component.facts),
        steps=tuple(_programs(node.config, stack)),
        parts=(*parts, *_norms(stack), *component.parts),
    )


def _size(node: Node, stack: Layers) -> str:
    return f"{many(stack.depth, 'layer')} on a residual stream of width {node.output.width:,}"


def _sharing(config: Config, stack: Layers) -> Iterator[str]:
    """Describe how layers differ or share weights."""
    if stack.repeats > 1:
        sets = "one set of weights" if len(stack.layers) == 1 else f"{len(stack.layers)} sets of weights"
        words = f"the layers share {sets}, each used {stack.repeats} times in a row"
        yield " ".join([words, *_papers(config, "groups")])
    if len(stack.variants) > 1:
        listed = ", ".join(stack.pattern) if isinstance(stack.pattern, tuple) else ""
        repeated = f", in the pattern [{listed}]" if 0 < len(listed) <= 2 * FEW else ""
        counts = ", ".join(f"{len(indices) * stack.repeats} {name}" for name, indices in stack.variants.items())
        yield " ".join([f"layers of {len(stack.variants)} variants{repeated}: {counts}", *_papers(config, "pattern")])


def _papers(config: Config, field: str) -> tuple[str, ...]:
    """Return the papers of a field of a config, or of a mapping in it."""
    inside = [value for _, value in config if isinstance(value, Config) and not isinstance(value, Component)]
    return next((papers for holder in (config, *inside) if (papers := field_papers(holder, field, None))), ())


def _where(names: set[str], stack: Layers) -> str:
    """Name the layers of these variants: by number if they are few, else by variant; an empty string for all layers."""
    layers = sorted(index for name in names for index in stack.variants[name])
    if len(layers) == len(stack.layers):
        return ""
    indices = [index * stack.repeats + run for index in layers for run in range(stack.repeats)]
    text = ranges(indices)
    sorts = " and ".join(sorted(names))
    what = f"layer{'' if len(indices) == 1 else 's'} {text}" if len(text) <= FEW else f"{len(indices)} layers"
    return f"{what} ({sorts})"


def _firsts(stack: Layers) -> Iterator[Layer]:
    """Yield the first layer of each variant."""
    return (stack.layers[indices[0]] for indices in stack.variants.values())


def _parts(role: str, stack: Layers) -> Iterator[Explanation]:
    """Describe the components of a role, once for all layers that share one; further ones by their differences."""
    groups: list[tuple[Explanation, set[str]]] = []
    for layer in _firsts(stack):
        for part in dict.fromkeys(_explained(layer, role)):
            same = next((names for component, names in groups if component == part), None)
            if same is not None:
                same.add(layer.name)
            else:
                groups.append((part, {layer.name}))
    groups.sort(key=lambda group: -sum(len(stack.variants[name]) for name in group[1]))
    for index, (part, names) in enumerate(groups):
        shown = differing(part, groups[0][0]) if index else part
        layers = tuple(sorted(number for name in names for number in stack.variants[name]))
        everywhere = len(layers) == len(stack.layers)
        yield replace(shown, where=_where(names, stack), layers=() if everywhere else layers)


def _explained(layer: Layer, role: str) -> Iterator[Explanation]:
    for step in layer.steps:
        if step.role == role and isinstance(step.config, AttentionConfig):
            yield explain_attention(role, step.config, step.mask)
        elif step.role == role and isinstance(step.config, MixerConfig):
            yield explain_mixer(role, step.config)
        elif step.role == role:
            yield explain_component(role, step.config)


def _norms(stack: Layers) -> Iterator[Explanation]:
    """Describe the norms of the residual stream, each kind once."""
    norms: dict[str, Component] = {}
    for layer in _firsts(stack):
        for step in layer.steps:
            for norm in (step.norm_in, step.norm_out, step.norm_after, layer.input_norm):
                if norm is not None:
                    norms.setdefault(norm.kind_name(), norm)
    if stack.final_norm is not None:
        norms.setdefault(stack.final_norm.kind_name(), stack.final_norm)
    yield from (explain_component("norm", norm) for norm in norms.values())


def _programs(config: Config, stack: Layers) -> Iterator[str]:
    """Describe the sublayers of the layers, one per line, for each variant in turn."""
    programs: dict[tuple[str, ...], list[Layer]] = {}
    for layer in _firsts(stack):
        programs.setdefault(tuple(as_sentences(layer)), []).append(layer)
    for steps, layers in programs.items():
        where = _where({layer.name for layer in layers}, stack)
        yield f"{f'Layers: {where}' if where else 'Each layer'}{_placement(config, layers)}:"
        yield from (f"{index}. {step}" for index, step in enumerate(steps, 1))
    if stack.final_norm is not None:
        yield f"After the last layer: {stack.final_norm.kind_name()}."


def _placement(config: Config, layers: Sequence[Layer]) -> str:
    word = layers[0].placement
    papers = field_papers(config, "placement", word)
    return "" if word is None else f", placement {word}{''.join(f', {link}' for link in papers)}"

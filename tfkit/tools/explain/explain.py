"""A description of a model in the order of the data flow: nodes, stacks of layers, components, sizes and costs."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tfkit.arguments import checked
from tfkit.building.edits import AnyModel, as_model
from tfkit.component import (
    AttentionConfig,
    Cached,
    Component,
    Config,
    FFNConfig,
    Layer,
    Layers,
    MaskConfig,
    MixerConfig,
    PositionConfig,
    SharedMarker,
    Signal,
    State,
    SublayerConfig,
    WireMarker,
    marker,
)
from tfkit.errors import ranges
from tfkit.graph.expand import Graph, Node, as_list
from tfkit.graph.input_shapes import rows_of
from tfkit.graph.wiring import table_owner
from tfkit.plugin.registry import field_docs
from tfkit.tools.common.memory_needs import CacheSize, cache_size
from tfkit.tools.common.ownership import rank
from tfkit.tools.cost.cost import ComponentCost, cost
from tfkit.tools.show.layer_programs import as_sentences
from tfkit.tools.show.resolved_values import number


@dataclass(frozen=True)
class Explained:
    """A description of a model for readers who see it for the first time.

    Attributes:
        name: the name of the model.
        description: the description in the spec, of its distinctive features.
        source: the paper or the reference implementation that the spec names.
        parameters: parameters of the model; the nodes and everything inside them add up to this number.
        active: parameters by which a token is multiplied: of routed experts, only the chosen experts count.
        flops: FLOPs of a forward over `length` tokens; the nodes add up to this number.
        length: number of tokens of that forward.
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
def explain(graph: AnyModel) -> Explained:
    """Explain a spec, or the spec of a built model: describe every component by its docstrings, with sizes and costs.

    FLOPs are counted for a forward over as many tokens as `cost` uses by default. Raises SpecError if the model cannot
    be built.
    """
    graph = as_model(graph, "the text, its sizes and its costs describe the spec").graph
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
    what = {"tokens": "token ids", "sequence": "vectors", "lengths": "a length for each sequence"}.get(signal.type, "")
    if signal.type in ("image", "vector"):
        return f"{name}: {signal.in_words()} for each example"
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
        facts=component.facts
        if stack.is_sublayer
        else (_size(node, stack), *_sharing(node.config, stack), *component.facts),
        steps=() if stack.is_sublayer else tuple(_programs(node.config, stack)),
        parts=(*parts, *_around(stack), *component.parts),
    )


def _size(node: Node, stack: Layers) -> str:
    return f"{many(stack.depth, 'layer')} on a residual stream of width {node.output.width:,}"


def _sharing(config: Config, stack: Layers) -> Iterator[str]:
    """Describe how layers differ or share weights."""
    if stack.repeats > 1:
        sets = "one set of weights" if len(stack.layers) == 1 else f"{len(stack.layers)} sets of weights"
        words = f"the layers share {sets}, each used {stack.repetition}"
        yield " ".join([words, *_papers(config, "order" if stack.looped else "groups")])
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
    indices = [number for number, index in enumerate(stack.runs) if index in layers]
    text = ranges(indices)
    sorts = " and ".join(sorted(names))
    what = f"layer{'' if len(indices) == 1 else 's'} {text}" if len(text) <= FEW else f"{len(indices)} layers"
    return f"{what} ({sorts})"


def _firsts(stack: Layers) -> Iterator[Layer]:
    """Yield the first layer of each variant."""
    return (stack.layers[indices[0]] for indices in stack.variants.values())


def _parts(role: str, stack: Layers) -> Iterator[Explanation]:
    """Describe the components of a role: a shared component once, further components by their differences."""
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


def _around(stack: Layers) -> Iterator[Explanation]:
    """Describe the norms and residuals around the sublayers, each kind once. Plain additions are omitted."""
    components: dict[tuple[str, str], Component] = {}
    for layer in _firsts(stack):
        for step in layer.steps:
            residual = None if step.read is None else step.residual
            for part in (layer.around, residual, step.norm_in, step.norm_out, step.norm_after, layer.input_norm):
                if part is not None:
                    components.setdefault((part.slot, part.kind_name()), part)
    if stack.final_norm is not None:
        components.setdefault(("norm", stack.final_norm.kind_name()), stack.final_norm)
    yield from (explain_component(slot, part) for (slot, _), part in components.items())


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


# ---- a description of a component: its purpose, its sizes as sentences, its papers, and the components inside it ----
#
# A paper belongs to a component if it is in the docstring of its class, or in the docstring of its module after a label
# that is its kind, its class or a field (`Grouped-query: https://...`), or without a label. A plugin's component is
# therefore explained like a built-in component, in its author's words.


_LINK = re.compile(r"(?:([\w-]+(?:,?(?: |\n(?!\s))[\w-]+)*):\s+)?(https?://[^\s,;)]*[^\s,;:).])")
_END = re.compile(r"(?<=[\w)\]`]\.)\s|(?<=\w\.\))\s|\n\s*\n")


def sentence(text: str) -> str:
    """Return the first sentence of a text, on one line and without links."""
    first = _END.split(inspect.cleandoc(text), maxsplit=1)[0]
    bare = re.sub(r"\(\s*\)", "", _LINK.sub("", first))
    return re.sub(r"[\s,:;]+(\.?)$", r"\1", " ".join(bare.split()))


def doc_of(config: Config | type[Config]) -> str:
    """Return the description of a component: `in_words()`, else the first sentence of its class, else `""`."""
    if isinstance(config, Config) and (text := config.in_words()) is not None:
        return text
    cls = config if isinstance(config, type) else type(config)
    return sentence(vars(cls).get("__doc__") or "")


def papers_of(config: Config | type[Config]) -> tuple[str, ...]:
    """Return the papers of a component."""
    cls = config if isinstance(config, type) else type(config)
    links = [link for _, link in _links(cls.__doc__ or "")]
    if links:
        return tuple(links)
    word = str(cls.model_fields[cls.word_key].default) if cls.word_key in cls.model_fields else ""
    module_links = _links(_module_doc(cls))
    stem, slot = re.sub(r"Config$", "", cls.__name__), re.escape(cls.slot if issubclass(cls, Component) else "-")
    names = (word, stem, re.sub(f"{slot}$", "", stem, flags=re.IGNORECASE))
    named = [link for label, link in module_links if _names(label, names)]
    whole = [link for label, link in module_links if not label] if issubclass(cls, Component) else []
    return tuple(named or whole[:1])


def field_words(config: Config, name: str) -> str:
    """Return the purpose of a field, in one sentence."""
    return sentence(field_docs(type(config)).get(name, ""))


def field_papers(config: Config, name: str, value: object) -> tuple[str, ...]:
    """Return the papers of a field's value: links in the text of the field, else in the text of the module."""
    links = [link for _, link in _links(field_docs(type(config)).get(name, ""))]
    words = (name, value if isinstance(value, str) else "")
    for cls in [] if links else type(config).__mro__:
        if issubclass(cls, Config) and name in inspect.get_annotations(cls):
            links = [link for label, link in _links(_module_doc(cls)) if _names(label, words)]
            break
    return tuple(links)


def _module_doc(cls: type) -> str:
    module = sys.modules.get(cls.__module__)  # a module can leave `sys.modules` while its classes are in use
    return (module and module.__doc__) or ""


@cache
def _links(text: str) -> tuple[tuple[str, str], ...]:
    """Return the links of a text, each with the label before it or an empty string."""
    return tuple((match[1] or "", match[2]) for match in _LINK.finditer(text))


def _names(label: str, words: Iterable[str]) -> bool:
    """Return True if a label (`YaRN and NTK`) names one of the words, ignoring case and punctuation."""
    labels = set(_folded(re.split(r",| and | or ", label)))
    return any(word in labels for word in _folded(words))


def _folded(words: Iterable[str]) -> Iterator[str]:
    for word in words:
        if folded := re.sub(r"[\W_]+", "", word).lower():
            yield folded


SAID = frozenset({"d_model", "n_heads", "n_kv_heads", "d_head", "mask", "dropout", "bias", "max_len", "n_layers"})
"""Fields that have separate sentences, or that all components share."""


@dataclass(frozen=True)
class Explanation:
    """A description of a component for readers who see it for the first time.

    Attributes:
        name: its name in the spec: a node, or a slot.
        kind: its kind; None if it has no kind.
        where: the layers that have it, unless all layers do; for a node, its sources.
        layers: the numbers of the layers that have it, unless all layers do.
        says: its description, a sentence of its docstring.
        papers: its sources.
        facts: its sizes and settings, a sentence each.
        steps: the steps of a layer, in order; only for a stack.
        parameters: its parameters, without the components inside it.
        flops: its FLOPs of one forward, without the components inside it.
        parts: the components inside it, in the order in which they run.
    """

    name: str
    kind: str | None = None
    where: str = ""
    layers: tuple[int, ...] = ()
    says: str = ""
    papers: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    parameters: int = 0
    flops: int = 0
    parts: tuple[Explanation, ...] = ()

    def walk(self) -> Iterator[Explanation]:
        """Yield the component and everything inside it."""
        yield self
        for part in self.parts:
            yield from part.walk()


def explain_component(
    name: str, config: Config, *, facts: tuple[str, ...] = (), leave_out: frozenset[str] = frozenset()
) -> Explanation:
    """Describe a component, its settings, and the components in its slots."""
    kind = config.kind_name() if isinstance(config, Component) else None
    texts, inside = list(facts), []
    for field, value in _given(config, leave_out):
        if isinstance(value, Config):
            inside.append(_inside(config, field, value))
        else:
            texts.append(_fact(config, field, value))
    return Explanation(
        name, kind, says=doc_of(config), papers=papers_of(config), facts=tuple(texts), parts=tuple(inside)
    )


def _inside(config: Config, field: str, value: Config) -> Explanation:
    """Describe the contents of a field. Its purpose is omitted if the field is named after its slot."""
    part, role = explain_component(field, value), field_words(config, field)
    if not isinstance(value, Component) or value.slot.endswith(field) or not role:
        return part
    return replace(
        part,
        says=f"{role.rstrip('.')}. {part.says}".strip(),
        papers=(*field_papers(config, field, value), *part.papers),
    )


def _given(config: Config, leave_out: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields to mention: required sizes, and values that differ from the defaults."""
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        hidden = name in leave_out or name in SAID or name == config.word_key
        wire = marker(info, WireMarker) is not None and not isinstance(value, Mapping)
        if hidden or wire or (marker(info, SharedMarker) is not None and not info.is_required()):
            continue
        default = None if info.is_required() else info.get_default(call_default_factory=True)
        if value is not None and (value != default or (isinstance(config, PositionConfig) and _is_size(value))):
            yield name, value


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _fact(config: Config, name: str, value: Any) -> str:
    """Describe a setting and its purpose: `theta 500,000: Base of the geometric series of frequencies`."""
    words = field_words(config, name)
    if isinstance(value, bool):
        shown = name if value else f"no {name}"
    else:
        text = number(value)
        shown = f"{name} {text if len(text) <= 60 else f'{text[:56]} ...'}"
        if name == "d_ff" and isinstance(config, FFNConfig):
            shown += f", {value / config.d_model:.3g} x d_model"
    return " ".join([f"{shown}: {words}" if words else shown, *field_papers(config, name, value)])


def explain_attention(name: str, config: AttentionConfig, mask: MaskConfig | None) -> Explanation:
    """Describe an attention: its heads, the tensors that it keeps, and the tokens that a query attends to."""
    facts = [_heads(config)]
    if mask is not None:
        facts.append(_reads(mask))
    if mask is not None and mask.causal and config.cached is not None:
        numbers = sum(entry.heads * entry.width for entry in config.cached if isinstance(entry, Cached))
        facts += [f"a cache keeps {numbers:,} numbers of each token in each layer"] if numbers else []
    return explain_component(name, config, facts=(*facts, *_states(config)))


def explain_mixer(name: str, config: MixerConfig) -> Explanation:
    """Describe a mixer: the positions that it mixes, and its states."""
    reads = "each token reads itself and all before it" if config.causal else "each token reads the whole sequence"
    return explain_component(name, config, facts=(reads, *_states(config)))


def _states(config: SublayerConfig) -> Iterator[str]:
    """Describe the states of a sublayer, if it has any."""
    states = [entry for entry in config.cached or () if isinstance(entry, State)]
    numbers = sum(math.prod(state.shape(0)) for state in states)
    if numbers:
        shapes = " and ".join(dict.fromkeys(" x ".join(map(str, state.shape(0))) for state in states))
        yield f"a state keeps {numbers:,} numbers of a sequence of any length in each layer, {shapes}"


def _heads(config: AttentionConfig) -> str:
    heads, kv_heads = config.n_heads, config.kv_heads
    width = f" of width {config.head_width:,}" if "d_head" in type(config).model_fields else ""
    if kv_heads == heads:
        return f"{many(heads, 'head')}{width}"
    share = f"{heads} query heads{width} share {many(kv_heads, 'key-value head')}"
    return f"{share}: the cache is {heads / kv_heads:.3g} times smaller"


def many(count: int, what: str) -> str:
    """Format a count: `1 layer`, `12 layers`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _reads(mask: MaskConfig) -> str:
    """Describe the tokens that a query may attend to."""
    if mask.rule is not None:
        fields = ", ".join(f"{name} {value}" for name, value in mask.rule if name != mask.rule.word_key)
        rule = f"{mask.rule.kind_name()} {fields}".strip()
        return f"{_reads(mask.model_copy(update={'rule': None}))}, as far as the mask rule allows: {rule}"
    if mask.left is None and mask.right is None:
        return "each token reads all tokens"
    if mask.right == 0:
        before = "all before it" if mask.left is None else f"the {mask.left:,} before it"
        return f"each token reads itself and {before}"
    left, right = ("all" if side is None else f"{side:,}" for side in (mask.left, mask.right))
    return f"each token reads itself, {left} before it and {right} after it"


def differing(part: Explanation, first: Explanation) -> Explanation:
    """Reduce the description of a component to its differences from the first layers."""
    if part.kind != first.kind:
        return part
    counterparts: Mapping[tuple[str, str | None], Explanation] = {
        (component.name, component.kind): component for component in first.parts
    }
    parts = [
        differing(component, counterparts[component.name, component.kind])
        if (component.name, component.kind) in counterparts
        else component
        for component in part.parts
    ]
    facts = tuple(fact for fact in part.facts if fact not in first.facts)
    kept = tuple(component for component in parts if component.facts or component.parts or component.says)
    gone = [component.name for component in first.parts if component.name not in {other.name for other in part.parts}]
    facts += tuple(f"without {name}" for name in gone)
    return replace(part, says="", papers=(), facts=facts, parts=kept)

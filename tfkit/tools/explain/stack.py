"""Stacks in words: the steps of one layer, and the components of its layers, each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tfkit.component import Component
from tfkit.errors import ranges
from tfkit.graph.expand import Node
from tfkit.tools.explain.explanation import Explanation, differing, explain_attention, explain_component, many
from tfkit.tools.explain.words import doc_of, field_papers, papers_of
from tfkit.tools.show.values import number

SLOTS = ("attention", "cross_attention", "ffn")
NAMES = {"attention": "attention", "cross_attention": "cross-attention", "ffn": "the FFN"}
STACK = frozenset({*SLOTS, "norm", "layers", "placement", "residual", "sublayers", "final_norm", "input_norm"})
FEW = 28
"""The longest list of layers, in letters, that is written out; a pattern may have twice as many."""


def explain_stack(node: Node) -> Explanation:
    """A stack of layers."""
    config: Any = node.config
    plan = [(name, layer) for name, layer in config.plan() for _ in range(config.repeats())]
    own = explain_component(node.name, config, leave_out=STACK)
    facts = [_size(config), *_sharing(config, plan), *own.facts]
    parts = [part for slot in SLOTS for part in _slot_parts(slot, config, node, plan)]
    return Explanation(
        node.name,
        config.kind_name(),
        says=doc_of(config),
        papers=papers_of(config),
        facts=tuple(facts),
        steps=tuple(_programs(config, plan, memory="memory" in node.wires)),
        parts=(*parts, *_norms(config, plan, memory="memory" in node.wires), *own.parts),
    )


def _size(config: Any) -> str:
    return f"{many(config.n_layers, 'layer')} on a residual stream of width {config.d_model:,}"


def _sharing(config: Any, plan: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """The ways in which layers differ or share."""
    if config.repeats() > 1:
        sets = "one set of weights" if len(config.plan()) == 1 else f"{len(config.plan())} sets of weights"
        papers = field_papers(config.layers, "groups", None)
        yield " ".join([f"the layers share {sets}, each used {config.repeats()} times in a row", *papers])
    names = [name for name, _ in plan]
    if len(set(names)) > 1:
        pattern = config.layers.pattern
        papers = field_papers(config.layers, "pattern", None)
        listed = ", ".join(pattern) if isinstance(pattern, tuple) else ""
        repeated = f", in the pattern [{listed}]" if 0 < len(listed) <= 2 * FEW else ""
        yield " ".join([f"layers of {len(set(names))} variants{repeated}: {_counts(names)}", *papers])


def _counts(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _where(names: set[str], plan: Sequence[tuple[str, Any]]) -> str:
    """The layers of these variants: their numbers if those are few, else their variants; empty for all."""
    indices = [i for i, (name, _) in enumerate(plan) if name in names]
    if len(indices) == len(plan):
        return ""
    text = ranges(indices)
    sorts = " and ".join(sorted(names))
    what = f"layer{'' if len(indices) == 1 else 's'} {text}" if len(text) <= FEW else f"{len(indices)} layers"
    return f"{what} ({sorts})"


def _slot_parts(slot: str, config: Any, node: Node, plan: Sequence[tuple[str, Any]]) -> Iterator[Explanation]:
    """The component in a slot, once for all layers if it is the same; for others the differences."""
    found: list[tuple[Explanation, set[str]]] = []
    for name in dict.fromkeys(name for name, _ in plan):
        layer = next(layer for other, layer in plan if other == name)
        part = _slot_part(slot, config, layer, memory="memory" in node.wires)
        if part is None:
            continue
        same = next((names for known, names in found if known == part), None)
        if same is not None:
            same.add(name)
        else:
            found.append((part, {name}))
    found.sort(key=lambda one: -sum(name in one[1] for name, _ in plan))
    for index, (part, names) in enumerate(found):
        shown = differing(part, found[0][0]) if index else part
        layers = tuple(number for number, (name, _) in enumerate(config.plan()) if name in names)
        everywhere = len(layers) == len(config.plan())
        yield replace(shown, where=_where(names, plan), layers=() if everywhere else layers)


def _slot_part(slot: str, config: Any, layer: Any, *, memory: bool) -> Explanation | None:
    if not any(step.sublayer == slot for step in layer.steps(memory=memory)):
        return None
    if slot == "ffn":
        return explain_component(slot, layer.ffn)
    return explain_attention(slot, layer.attention_of(slot), config.default_mask() if slot == "attention" else None)


def _norms(config: Any, plan: Sequence[tuple[str, Any]], *, memory: bool) -> Iterator[Explanation]:
    """The norms of the residual stream, each kind once."""
    norms: dict[str, Component] = {}
    for _, layer in {name: (name, layer) for name, layer in plan}.values():
        for step in layer.steps(memory=memory):
            for norm in (step.norm_in, step.norm_out, step.norm_after, layer.norm_of_input()):
                if norm is not None:
                    norms.setdefault(norm.kind_name(), norm)
    if (last := config.closing_norm()) is not None:
        norms.setdefault(last.kind_name(), last)
    for norm in norms.values():
        yield explain_component("norm", norm)


def _programs(config: Any, plan: Sequence[tuple[str, Any]], *, memory: bool) -> Iterator[str]:
    """The steps of the layers, a line each; those of layers that differ one after the other."""
    programs: dict[tuple[str, ...], set[str]] = {}
    for name, layer in plan:
        programs.setdefault(tuple(_steps(layer, memory=memory)), set()).add(name)
    for steps, names in programs.items():
        where = _where(names, plan)
        preset = "" if config.sublayers or not config.norm else _placement(config)
        yield f"{f'Layers: {where}' if where else 'Each layer'}{preset}:"
        yield from (f"{index}. {step}" for index, step in enumerate(steps, 1))
    if (norm := config.closing_norm()) is not None:
        yield f"After the last layer: {norm.kind_name()}."


def _placement(config: Any) -> str:
    papers = field_papers(config, "placement", config.placement)
    return f", placement {config.placement}{''.join(f', {link}' for link in papers)}"


def _steps(layer: Any, *, memory: bool) -> Iterator[str]:
    """The steps of a layer as sentences."""
    steps, norm = layer.steps(memory=memory), layer.norm_of_input()
    both = "" if norm is None else " normalized"
    if norm is not None and any(step.reads_input for step in steps):
        yield f"normalize the layer's input ({norm.kind_name()})"
    for step in steps:
        words = [f"normalize ({step.norm_in.kind_name()})"] if step.norm_in is not None else []
        source = f" of the layer's{both} input" if step.reads_input else ""
        source += " to the memory" if step.sublayer == "cross_attention" else ""
        words.append(f"{NAMES[step.sublayer]}{source}")
        words += [f"normalize ({step.norm_out.kind_name()})"] if step.norm_out is not None else []
        words += [f"drop {layer.dropout:.0%}"] if layer.dropout else []
        words.append(_add(step.residual))
        words += [f"normalize ({step.norm_after.kind_name()})"] if step.norm_after is not None else []
        yield ", ".join(words)


def _add(residual: Any) -> str:
    """The addition of a sublayer's output, in words."""
    scale = "" if residual.scale == 1 else f"{number(residual.scale)} times "
    learned = "" if residual.learned == "none" else f"a learned {residual.learned} times "
    what = f"{scale}{learned}it " if scale or learned else ""
    return f"add {what}to {'the normalized value' if residual.onto == 'normed' else 'the stream'}"

"""Stacks in words: the steps of one layer, and the components of its layers, each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tfkit.component import AttentionConfig, Component, Config, Layer, Layers
from tfkit.errors import ranges
from tfkit.graph.expand import Node
from tfkit.tools.common.ownership import rank
from tfkit.tools.explain.explanation import Explanation, differing, explain_attention, explain_component, many
from tfkit.tools.explain.words import doc_of, field_papers, papers_of
from tfkit.tools.show.steps import as_sentences

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

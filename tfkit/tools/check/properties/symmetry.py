"""Properties of order: what has no position may stand in any order."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from tfkit.checkpoint.weights import places
from tfkit.component import AttentionConfig, InputPositionConfig, MaskConfig, ScoreBiasConfig
from tfkit.graph.decode_split import computes_alone
from tfkit.graph.inputs import fixed_length
from tfkit.graph.pairs import deaf_to_pairs
from tfkit.tools.check.measure import DoesNotApplyError, Measured, distance, property_of
from tfkit.tools.check.places import compared
from tfkit.tools.check.properties.reading import arguments
from tfkit.tools.check.subject import Subject

DOCUMENTS = (5, 4, 3)
"""Tokens of the documents that share a row."""
PROJECTIONS = frozenset(
    f"{path}.{leaf}"
    for path in ("project.qkv", "project.q", "project.k", "project.v", "output")
    for leaf in ("weight", "bias")
)
"""Parameters of an attention whose order of heads is known."""


@property_of("memory-order", "reads a memory in any order", follows=("extents",))
def memory_order(subject: Subject) -> Iterator[Measured]:
    """Cross-attention returns the same for the vectors of its memory in another order."""
    crossing = [attention for attention in subject.attentions if attention.step.reads_memory]
    if not crossing:
        raise DoesNotApplyError("the spec has no cross-attention")
    calls = arguments(subject, subject.inputs())
    for attention in crossing:
        x, context, _ = calls[attention.path]
        assert context.memory is not None
        module = subject.model.get_submodule(attention.path)
        with torch.no_grad():
            expected, reordered = module(x, context), module(x, context._replace(memory=context.memory.flip(1)))
        error = distance(reordered, expected)
        detail = f"a memory in reverse order changes cross-attention by {error:.1e}"
        yield Measured(error, detail, where=attention.path)


@property_of("token-order", "moves its outputs with its tokens", follows=("alone",))
def token_order(subject: Subject) -> Iterator[Measured]:
    """Without positions, tokens in another order have their outputs in that order."""
    positions = any(True for _ in subject.graph.configs(InputPositionConfig))  # type: ignore[type-abstract]
    positions = positions or any(attention.config.position is not None for attention in subject.attentions)
    if positions:
        raise DoesNotApplyError("the spec has positions")
    for node in subject.graph.nodes:
        mixes = node.stack is None and node.output.type in ("sequence", "vector") and not computes_alone(node)
        if mixes or (node.stack is not None and node.stack.keeps_state):
            raise DoesNotApplyError(f"`{node.name}` may read the order of its input")
    if any(attention.step.mask not in (None, MaskConfig()) for attention in subject.attentions) or subject.causal:
        raise DoesNotApplyError("attention is limited by the order of tokens")
    if any(node.output.type == "logits" and node.output.width is None for node in subject.graph.nodes):
        raise DoesNotApplyError("logits without an axis of classes look like vectors")
    inputs = subject.inputs()
    turned = {name: x.flip(1) if x.dim() > 1 else x for name, x in inputs.items()}
    runs = partial(subject.run, inputs), partial(subject.run, turned)
    yield from compared(subject.model, *runs, "tokens in reverse order change their outputs by {}", _back)


def _back(want: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Return two outputs, the second, of reversed tokens, in the original order."""
    return want, turned.flip(1) if turned.dim() > 2 else turned


@property_of("documents", "keeps documents in one row apart", follows=("extents", "padding"))
def documents(subject: Subject) -> Iterator[Measured]:
    """With a mask of pairs, each of several documents in a row has the outputs that it has alone."""
    deaf = deaf_to_pairs(subject.graph)
    (name, *rest) = subject.graph.inputs
    if deaf is not None or rest or subject.length < sum(DOCUMENTS):
        raise DoesNotApplyError(f"`{deaf}` takes no mask of pairs" if deaf else "it has several inputs, or short ones")
    if fixed_length(subject.graph) is not None:
        raise DoesNotApplyError("its sequences have a fixed length")
    inputs = subject.inputs(batch=1, length=sum(DOCUMENTS))
    of = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
    together = {**inputs, f"{name}_mask": (of[:, None] == of)[None]}
    detail = "a document in a row with others changes by {}"
    for columns in torch.arange(len(of)).split(DOCUMENTS):
        part = slice(int(columns[0]), int(columns[-1]) + 1)
        runs = partial(subject.run, {name: inputs[name][:, part]}), partial(subject.run, together)
        yield from compared(subject.model, *runs, detail, partial(_part, part))


def _part(columns: slice, alone: Tensor, together: Tensor) -> tuple[Tensor, Tensor] | None:
    return (alone, together[:, columns]) if together.dim() > 2 else None


@property_of("head-order", "has heads in any order")
def head_order(subject: Subject) -> Iterator[Measured]:
    """Heads in reverse order, with their queries, keys, values and columns of the output, return the same."""
    model, inputs, applied = copy.deepcopy(subject.model), subject.inputs(), False
    expected = subject.run(inputs)
    for attending in subject.attentions:
        by_head = isinstance(attending.config.position, ScoreBiasConfig) or attending.config.kv_heads < 2
        attention = model.get_submodule(attending.path)
        if by_head or {name for name, _ in attention.named_parameters()} - PROJECTIONS:
            continue
        applied = True
        _turn(attention, attending.config)
        for reference, output in zip(expected, subject.run(inputs, model), strict=True):
            error = distance(output, reference)
            detail = f"heads in reverse order change the outputs by {error:.1e}"
            yield Measured(error, detail, where=attending.path)
        _turn(attention, attending.config)  # back again
    if not applied:
        raise DoesNotApplyError("no attention has several heads whose weights are those of its projections alone")


def _turn(attention: nn.Module, config: AttentionConfig) -> None:
    """Reverse the order of key-value heads, each with its query heads, in place."""
    state = attention.state_dict()
    with torch.no_grad():
        for name, place in places(attention).items():
            view, axis = place.view(state), 1 if name == "output.weight" else 0
            if name != "output.bias":
                heads = view.unflatten(axis, (config.kv_heads, -1, config.head_width))
                view.copy_(heads.flip(axis).flatten(axis, axis + 2).clone())

"""Properties of each attention: the keys that it attends to, the order of heads and of a memory, and its backends."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from tfkit.checkpoint.weight_map import tensor_locations_of
from tfkit.component import AttentionConfig, MaskConfig, ScoreBiasConfig, Signal
from tfkit.graph.decode_split import memory_field
from tfkit.nn import Context
from tfkit.tools.check.measure import Deviation, output_deviations, property_of, require, tensor_deviation
from tfkit.tools.check.model_under_test import Attends, ModelUnderTest
from tfkit.tools.check.runs import Inputs, Padding, arguments_of

TRIES = 4
"""Number of inputs for an attention that seems to ignore a key: a gate may be closed by chance."""
SIZES = (1.0, 1e3)
"""Factors of an attention's input: large scores reveal a mask that subtracts a large number instead of infinity."""
HEADS_ALONG: Mapping[str, int | None] = {
    **{f"project.{part}": 0 for part in ("q", "k", "v")},
    "gate.linear": 0,
    "core.softmax": 0,
    "inner_norm": 0,
    "output": 1,
    **dict.fromkeys(("q_norm", "k_norm", "v_norm", "q_norm_rotated", "k_norm_rotated")),
}
"""The axis of the heads in the weights of each module of an attention; None if the heads share the weights."""


def _attention_calls(subject: ModelUnderTest, inputs: Inputs) -> Iterator[tuple[Attends, nn.Module, Tensor, Context]]:
    """Yield each attention that runs, with the arguments of its first call."""
    calls = arguments_of(subject.model, [attention.path for attention in subject.attentions], inputs)
    for attention in subject.attentions:
        if attention.path in calls:
            x, context = calls[attention.path]
            yield attention, subject.model.get_submodule(attention.path), x, context


# ---- extents ----


@property_of("extents", "attends to the keys that masks allow", follows=("position-wise",))
def mask_extents(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Each attention attends to exactly the keys that its mask grants, also next to padding."""
    # With a state, an attention also depends on tokens that its mask hides. Keys of another layer do not come from x.
    further = {attention.path for attention in subject.attentions if attention.step.keeps_state or attention.step.takes}
    require(len(subject.attentions) > len(further), "the spec has no stack with attention to keys alone")
    paddings: tuple[Padding, ...] = ("none", "left", "right") if subject.padded else ("none",)
    for padding in paddings:
        inputs = subject.inputs(padding=padding)
        for attention, module, x, context in _attention_calls(subject, inputs):
            # A mask that a block computes is not among the inputs.
            masked = padding == "none" or not _key_signal(subject, attention, context.memory).gaps
            if masked and attention.path not in further:
                granted = _granted_keys(subject, attention, inputs, x, context.memory)
                yield from _extent_deviations(attention, module, x, context, granted, padding)


def _extent_deviations(
    attention: Attends, module: nn.Module, x: Tensor, context: Context, granted: Tensor, padding: str
) -> Iterator[Deviation]:
    """Compare the keys that a module's outputs have a gradient to with the keys that the spec grants."""
    memory, fewer = context.memory, attention.config.chooses_keys
    for size in SIZES:
        read = _attended_keys(module, x * size, None if memory is None else memory * size, context)
        for shift in range(1, TRIES if size == 1 and not fewer else 1):  # a gate may be closed by chance
            if (read | ~granted).all():
                break
            read |= _attended_keys(module, x.roll(shift, dims=-1), memory, context)
        errors = (read & ~granted) if size > 1 or fewer else (read != granted)
        if memory is None:
            errors = errors & ~torch.eye(x.size(1), dtype=torch.bool)
        detail = _first_error(errors, granted, attention.step.mask, padding, size) if errors.any() else ""
        yield Deviation(int(errors.sum()), detail, 0, attention.path)


def _attended_keys(module: nn.Module, x: Tensor, memory: Tensor | None, context: Context) -> Tensor:
    """Return where a query's output has a gradient to a key's vector, bool [b, q, k]."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        keys = x if memory is None else memory.detach().requires_grad_()
        y = _attention_output(module(x, context if memory is None else context._replace(memory=keys)))
        weights = torch.randn(y.size(-1), generator=torch.Generator().manual_seed(0)).to(y)
        gradients = []
        for query in range(y.size(1)):
            (gradient,) = torch.autograd.grad((y[:, query] * weights).sum(), keys, retain_graph=True)
            gradients.append((gradient != 0).any(dim=-1))
    return torch.stack(gradients, dim=1)


def _attention_output(result: Any) -> Tensor:
    """Return the output of an attention, without the values that it may return for later layers."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _key_signal(subject: ModelUnderTest, attention: Attends, memory: Tensor | None) -> Signal:
    """Return the signal from which an attention computes its keys."""
    node = subject.graph.node(attention.path.partition(".")[0])
    signal = node.signals["input" if memory is None else memory_field(node)]
    assert isinstance(signal, Signal)
    return signal


def _granted_keys(
    subject: ModelUnderTest, attention: Attends, inputs: Inputs, x: Tensor, memory: Tensor | None
) -> Tensor:
    """Return where the spec lets a query attend to a key, bool [b, q, k]."""
    node, signal = subject.graph.node(attention.path.partition(".")[0]), _key_signal(subject, attention, memory)
    batch, queries = x.shape[:2]
    keys = queries if memory is None else memory.size(1)
    tokens = inputs.get(str(signal.mask), torch.ones(batch, keys, dtype=torch.bool))
    if memory is not None:
        return tokens[:, None].expand(-1, queries, -1)
    extent, ahead = attention.step.mask or MaskConfig(), torch.arange(keys) - torch.arange(queries)[:, None]
    left, right = (keys if side is None else side for side in (extent.left, extent.right))
    ahead, positions = ahead.expand(batch, -1, -1), tokens.cumsum(1) - 1
    if extent.rule is not None:  # positions are counted, so that padding after a sequence has that of the last token
        ahead = positions[:, None] - positions[:, :, None]
    if node.stack is not None and node.stack.blocks is not None:
        blocks = _blocks(subject, node.stack.blocks, inputs)
        ahead = ahead.where(~_same_block(blocks, tokens), ahead.clamp(max=0))
    near = (ahead >= -left) & (ahead <= right)
    if node.stack is not None and node.stack.prefix is not None:
        near = near | (tokens.cumsum(1) <= inputs[node.stack.prefix][:, None])[:, None]
    if extent.rule is not None and node.stack is not None:
        layer = node.stack.layers[int(attention.path.split(".")[2])]
        rule = subject.model.get_submodule(f"{node.name}.{layer.context}.rule")
        near = near & rule(positions[:, :, None], positions[:, None])
    return near & tokens[:, None]


def _blocks(subject: ModelUnderTest, name: str, inputs: Inputs) -> Tensor:
    """Return the number of the block of each token: an input, or 1 at the placeholders that a node seeks."""
    if name in inputs:
        return inputs[name]
    node = subject.graph.node(name)
    ((field, token),) = node.config.placeholders().items()
    return (inputs[str(node.wires[field])] == token).long()


def _same_block(blocks: Tensor, tokens: Tensor) -> Tensor:
    """Return where two tokens belong to one block, bool [b, q, k]: no token between them has another number."""
    same = torch.zeros(*blocks.shape, blocks.size(1), dtype=torch.bool)
    for row, numbers in enumerate(blocks):
        columns = tokens[row].nonzero()[:, 0].tolist()
        for _, run in groupby(columns, key=lambda column: int(numbers[column])):
            members = [column for column in run if numbers[column] > 0]
            same[row, torch.tensor(members, dtype=torch.long)[:, None], members] = True
    return same


def _first_error(errors: Tensor, granted: Tensor, mask: MaskConfig | None, padding: str, size: float) -> str:
    row, query, key = (int(index) for index in errors.nonzero()[0])
    limits = [] if mask is None else [("left", mask.left), ("right", mask.right)]
    sides = ", ".join(f"{side} {number}" for side, number in limits if number is not None)
    if mask is not None and mask.rule is not None:
        sides += f"{', ' if sides else ''}rule {mask.rule.kind_name()}"
    window = "" if mask is None else f", {f'mask {sides}' if sides else 'no limit'}"
    what = "does not read" if granted[row, query, key] else "reads"
    padded = "" if padding == "none" else f" next to padding on the {padding}"
    large = f", where its input is {size:g} times as large" if size > 1 else ""
    return f"query {query} {what} key {key}{padded}{window}{large}; {int(errors.sum())} keys in total"


@property_of("fully-masked", "attends to no padding where all keys are masked", follows=("extents",))
def nothing_to_read(subject: ModelUnderTest) -> Iterator[Deviation]:
    """If all keys are padding, attention returns the output for values of zero, and no gradient reaches the keys."""
    require(subject.attentions and subject.padded, "no attention may be without a key: nothing can be padded")
    for attention, module, x, context in _attention_calls(subject, subject.inputs(padding="rows")):
        padded = _key_signal(subject, attention, context.memory).mask is not None
        if padded and context.mask is not None:
            yield from _padding_row_effect(module, x, context, attention.path)


def _padding_row_effect(module: nn.Module, x: Tensor, context: Context, path: str) -> Iterator[Deviation]:
    """Measure the deviation of the last row, which is all padding, after its values change."""
    crossing = context.memory is not None
    keys = (context.memory if context.memory is not None else x).detach().requires_grad_()

    def last_row(keys: Tensor) -> Tensor:
        result = module(x, context._replace(memory=keys)) if crossing else module(keys, context)
        return _attention_output(result)[-1]

    with torch.enable_grad():
        y, zeroed = last_row(keys), last_row(torch.zeros_like(keys))
        (gradient,) = torch.autograd.grad(y.sum(), keys)
    if not (y.isfinite().all() and gradient.isfinite().all()):
        yield Deviation.fault("a query without a key has values or gradients that are not finite", path)
    else:
        yield tensor_deviation(y, zeroed, "a query without a key reads padding: it changes by {}", where=path)


# ---- memory ----


@property_of("memory", "reads its memory", follows=("position-wise",))
def memory_effect(subject: ModelUnderTest) -> Iterator[Deviation]:
    """The output of cross-attention changes with its memory."""
    require(any(attention.step.reads_memory for attention in subject.attentions), "the spec has no cross-attention")
    for attention, module, x, context in _attention_calls(subject, subject.inputs()):
        if attention.step.reads_memory:
            assert context.memory is not None
            memories = (context.memory, context.memory.flip(-1))  # negated, it has the products of keys and values
            with torch.no_grad():
                outputs = [module(x, context._replace(memory=memory)) for memory in memories]
            if torch.equal(*outputs):
                yield Deviation.fault(
                    "the memory is not read: the output is equal with a different memory", attention.path
                )
    yield Deviation(0.0, "")


@property_of("memory-order", "reads a memory in any order", follows=("extents",))
def memory_order(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Cross-attention returns the same output if the vectors of its memory are reordered."""
    require(any(attention.step.reads_memory for attention in subject.attentions), "the spec has no cross-attention")
    for attention, module, x, context in _attention_calls(subject, subject.inputs()):
        if attention.step.reads_memory:
            assert context.memory is not None
            with torch.no_grad():
                expected, reordered = module(x, context), module(x, context._replace(memory=context.memory.flip(1)))
            detail = "a memory in reverse order changes cross-attention by {}"
            yield tensor_deviation(reordered, expected, detail, where=attention.path)


@property_of("head-order", "has heads in any order")
def head_order(subject: ModelUnderTest) -> Iterator[Deviation]:
    """An attention whose heads are reversed, with all of their weights, returns the same output."""
    model, inputs, applied = copy.deepcopy(subject.model), subject.inputs(), False
    for attending in subject.attentions:
        by_head = isinstance(attending.config.position, ScoreBiasConfig) or attending.config.n_heads < 2
        wired = attending.config.gives or attending.config.takes  # the heads of other layers have the same order
        attention = model.get_submodule(attending.path)
        modules = {name.rpartition(".")[0] for name in tensor_locations_of(attention)}
        if by_head or wired or not modules <= HEADS_ALONG.keys():
            continue
        applied = True
        _reverse_heads(attention, attending.config)
        detail = "heads in reverse order change the outputs by {}"
        yield from output_deviations(subject.model, inputs, inputs, detail, second=model, where=attending.path)
        _reverse_heads(attention, attending.config)  # back again
    require(applied, "no attention has several heads whose weights are known")


def _reverse_heads(attention: nn.Module, config: AttentionConfig) -> None:
    """Reverse the order of query heads, and of key-value heads, in place."""
    state = attention.state_dict()
    with torch.no_grad():
        for name, location in tensor_locations_of(attention).items():
            view, path = location.view(state), name.rpartition(".")[0]
            axis = 0 if view.dim() == 2 and path in ("q_norm", "k_norm") else HEADS_ALONG[path]
            if axis is not None and axis < view.dim():  # the bias of the output belongs to no head
                heads = config.kv_heads if path in ("project.k", "project.v", "k_norm") else config.n_heads
                view.copy_(view.unflatten(axis, (heads, -1)).flip(axis).flatten(axis, axis + 1).clone())


@property_of("backends", "is equal with every attention backend", follows=("position-wise",))
def backend_agreement(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Every attention backend returns the same outputs as attention that is written out, also next to padding."""
    require(subject.attentions, "the spec has no stack with attention")
    eager = subject.build(attention_backend="eager")
    for padding in ("none", "left") if subject.padded else ("none",):
        inputs = subject.inputs(padding=padding)
        yield from output_deviations(
            subject.model, inputs, inputs, "attention that is written out differs by {}", second=eager
        )

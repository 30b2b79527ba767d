"""Properties of reading: which positions an output, or an attention, depends on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.builder import evaluating
from tfkit.component import MaskConfig, Signal
from tfkit.nn import Context
from tfkit.nn.checked import of_length
from tfkit.tools.check.inputs import Inputs, Padding, call, hooked
from tfkit.tools.check.measure import DoesNotApplyError, Measured, distance, property_of
from tfkit.tools.check.places import along, first_difference
from tfkit.tools.check.subject import Attends, Subject


def _causal(subject: Subject) -> tuple[str, ...]:
    if not subject.causal:
        raise DoesNotApplyError("every position may read all others")
    return subject.causal


@property_of("look-ahead", "reads no later token", follows=("alone",))
def look_ahead(subject: Subject) -> Iterator[Measured]:
    """No earlier output changes with a later token."""
    for name in _causal(subject):
        yield from later_values(subject.model, subject.inputs(), name)


@property_of("look-ahead-gradient", "has no gradient to later tokens", follows=("alone", "look-ahead"))
def look_ahead_gradient(subject: Subject) -> Iterator[Measured]:
    """No output has a gradient to a later token."""
    for name in _causal(subject):
        yield from later_gradients(subject.model, subject.inputs(), name)


def later_values(model: fx.GraphModule, inputs: Inputs, name: str) -> Iterator[Measured]:
    """Compare earlier outputs [b, t, ...] when later tokens of an input are replaced by tokens of another row."""
    x = inputs[name]
    with evaluating(model), torch.no_grad():
        outputs = call(model, inputs)
        for t in range(1, x.size(1)):
            changed = {**inputs, name: torch.cat((x[:, :t], x[:, t:].roll(1, dims=0)), dim=1)}
            for before, after in zip(outputs, call(model, changed), strict=True):
                error = distance(after[:, :t], before[:, :t])
                why = f"outputs before position {t} change by {error:.1e} with `{name}` from {t} on"
                runs = (partial(call, model, inputs), partial(call, model, changed))
                where = partial(first_difference, model, *runs, along(slice(t)))
                yield Measured(error, f"the model looks ahead: {why}", where=where)


def later_gradients(model: fx.GraphModule, inputs: Inputs, name: str) -> Iterator[Measured]:
    """Find gradients of outputs [b, t, ...] to later tokens of an input."""
    x = inputs[name]
    with evaluating(model), _leaves(model, name) as leaves:
        if x.is_floating_point():
            leaves.append(x.detach().requires_grad_())
            inputs = {**inputs, name: leaves[0]}
        outputs = call(model, inputs)
    for output in outputs:
        weights = torch.randn(output.shape[2:], generator=torch.Generator().manual_seed(0))  # norms hide plain sums
        for t in range(x.size(1)):
            total = (output[:, t] * weights).sum()
            grads: Sequence[Tensor | None] = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
            nonzero = [grad for grad in grads if grad is not None and grad.any()]
            if not nonzero:
                yield Measured.fault(f"output {t} has no gradient to any token of `{name}`")
                return
            leak = max(distance(grad[:, t + 1 :], torch.zeros(1)) for grad in nonzero)
            why = f"output {t} has a gradient of {leak:.1e} to later tokens of `{name}`"
            yield Measured(leak, f"the model looks ahead: {why}")


@contextmanager
def _leaves(model: fx.GraphModule, name: str) -> Iterator[list[Tensor]]:
    """Collect the outputs of the modules that read the tokens `name`, as leaves of the gradient."""
    leaves: list[Tensor] = []

    def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if args[0].is_floating_point():
            return output
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    (tokens,) = model.graph.find_nodes(op="placeholder", target=name)
    checked = [user for user in tokens.users if user.target is of_length]
    readers = [user for node in (tokens, *checked) for user in node.users if user.op == "call_module"]
    modules = [model.get_submodule(str(user.target)) for user in readers]
    handles = [module.register_forward_hook(hook) for module in modules]
    with hooked(handles):
        yield leaves


# ---- extents ----


TRIES = 4
"""Inputs of an attention that does not read all that it may."""
SIZES = (1.0, 1e3)
"""Factors of an attention's input: a mask that is only a large number shows with large scores."""


@property_of("extents", "reads the keys that masks grant", follows=("alone",))
def extents(subject: Subject) -> Iterator[Measured]:
    """Each attention reads exactly the keys that its mask grants, also next to padding."""
    # With a state, an attention also depends on tokens that its mask hides.
    attentions = [attention for attention in subject.attentions if not attention.step.keeps_state]
    if not attentions:
        raise DoesNotApplyError("the spec has no stack with attention to keys alone")
    paddings: list[Padding] = ["none", *(["left", "right"] if subject.padded else [])]  # type: ignore[list-item]
    for padding in paddings:
        calls = arguments(subject, subject.inputs(padding=padding))
        for attention in attentions:
            if attention.path not in calls:
                continue
            x, context, inputs = calls[attention.path]
            if (
                padding == "none" or not _signal(subject, attention, context.memory).gaps
            ):  # no input has a block's own mask
                yield from _extent(subject, attention, x, context, inputs, padding)


def arguments(subject: Subject, inputs: Inputs) -> dict[str, tuple[Tensor, Context, Inputs]]:
    """Return the arguments of each attention's first call, by its path."""
    calls: dict[str, tuple[Tensor, Context, Inputs]] = {}

    def keep(path: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.setdefault(path, (args[0].detach(), args[1], inputs))

    model = subject.model
    handles = [
        model.get_submodule(attention.path).register_forward_pre_hook(partial(keep, attention.path))
        for attention in subject.attentions
    ]
    with hooked(handles):
        subject.run(inputs)
    return calls


def _extent(
    subject: Subject, attention: Attends, x: Tensor, context: Context, inputs: Inputs, padding: str
) -> Iterator[Measured]:
    """Compare the keys that a module's outputs have a gradient to with those that the spec grants."""
    module, memory = subject.model.get_submodule(attention.path), context.memory
    granted = _granted(subject, attention, inputs, x.size(1), memory)
    for size in SIZES:
        read = _read(module, x * size, None if memory is None else memory * size, context)
        for shift in range(1, TRIES if size == 1 else 1):  # a gate may be closed by chance
            if (read | ~granted).all():
                break
            read |= _read(module, x.roll(shift, dims=-1), memory, context)
        errors = (read & ~granted) if size > 1 else (read != granted)
        if memory is None:
            errors = errors & ~torch.eye(x.size(1), dtype=torch.bool)
        count = int(errors.sum())
        yield Measured(
            count, _first_wrong(errors, granted, attention, padding, size) if count else "", 0, attention.path
        )


def _read(module: nn.Module, x: Tensor, memory: Tensor | None, context: Context) -> Tensor:
    """Return where a query's output has a gradient to a key's vector, bool [b, q, k]."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        keys = x if memory is None else memory.detach().requires_grad_()
        y = module(x, context if memory is None else context._replace(memory=keys))
        weights = torch.randn(y.size(-1), generator=torch.Generator().manual_seed(0)).to(y)
        gradients = []
        for query in range(y.size(1)):
            (gradient,) = torch.autograd.grad((y[:, query] * weights).sum(), keys, retain_graph=True)
            gradients.append((gradient != 0).any(dim=-1))
    return torch.stack(gradients, dim=1)


def _signal(subject: Subject, attention: Attends, memory: Tensor | None) -> Signal:
    """Return the signal from which an attention computes its keys."""
    signal = subject.graph.node(attention.path.partition(".")[0]).signals["input" if memory is None else "memory"]
    assert isinstance(signal, Signal)
    return signal


def _granted(subject: Subject, attention: Attends, inputs: Inputs, queries: int, memory: Tensor | None) -> Tensor:
    """Return where the spec lets a query attend to a key, bool [b, q, k]."""
    node, signal = subject.graph.node(attention.path.partition(".")[0]), _signal(subject, attention, memory)
    batch, keys = next(iter(inputs.values())).size(0), queries if memory is None else memory.size(1)
    tokens = inputs.get(str(signal.mask), torch.ones(batch, keys, dtype=torch.bool))
    if memory is not None:
        return tokens[:, None].expand(-1, queries, -1)
    extent, ahead = attention.step.mask or MaskConfig(), torch.arange(keys) - torch.arange(queries)[:, None]
    left, right = (keys if side is None else side for side in (extent.left, extent.right))
    near = ((ahead >= -left) & (ahead <= right)).expand(batch, -1, -1)
    if node.stack is not None and node.stack.prefix is not None:
        near = near | (tokens.cumsum(1) <= inputs[node.stack.prefix][:, None])[:, None]
    return near & tokens[:, None]


def _first_wrong(errors: Tensor, granted: Tensor, attention: Attends, padding: str, size: float) -> str:
    row, query, key = (int(index) for index in errors.nonzero()[0])
    mask = attention.step.mask
    window = "" if mask is None else f", {mask_in_words(mask)}"
    what = "does not read" if granted[row, query, key] else "reads"
    padded = "" if padding == "none" else f" beside padding on the {padding}"
    large = f", where its input is {size:g} times as large" if size > 1 else ""
    return f"query {query} {what} key {key}{padded}{window}{large}; {int(errors.sum())} keys in all"


def mask_in_words(mask: MaskConfig) -> str:
    """Return the extent as a few words."""
    sides = [f"{side} {number}" for side, number in (("left", mask.left), ("right", mask.right)) if number is not None]
    return f"mask {', '.join(sides)}" if sides else "no limit"

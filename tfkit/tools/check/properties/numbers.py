"""Properties of numbers: types, rounding, large values, and tensors that nobody may change."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.building.builder import build, inputs_of
from tfkit.building.placement import name_of
from tfkit.errors import SpecError
from tfkit.graph.expand import Graph
from tfkit.nn import Context
from tfkit.tools.build.first_run import run_watched
from tfkit.tools.check.choices import Choices
from tfkit.tools.check.inputs import call, cast, example_inputs, hooked
from tfkit.tools.check.measure import DoesNotApplyError, Measured, distance, in_words, property_of
from tfkit.tools.check.places import first_difference
from tfkit.tools.check.properties.reading import arguments
from tfkit.tools.check.subject import Subject
from tfkit.torch_private.tensors import leaves

FLOAT32, BFLOAT16 = 2e-6, 5e-2
"""The largest differences from float64, relative to the largest value if that is above 1."""
GROWTH = 20.0
"""Factor by which the rounding errors of late positions may exceed the errors of early positions."""
LARGE = 1e3
"""Factor of the vectors that enter a stack."""


@property_of("types", "computes in bfloat16")
def types(subject: Subject) -> Iterator[Measured]:
    """A model in bfloat16 computes in that type, and stays finite."""
    yield from computes_in(subject.graph, torch.bfloat16)


def computes_in(graph: Graph, dtype: torch.dtype) -> Iterator[Measured]:
    """Build a model of another type, and look at the types and values of its outputs."""
    inputs = cast(example_inputs(graph), dtype)
    try:
        model = build(graph, dtype=dtype).eval()
        run_watched(model, {name: x for name, x in inputs.items() if name in inputs_of(model)})
    except SpecError as error:
        yield Measured.fault(f"a model of {dtype} fails: {in_words(error)}")
        return
    with torch.no_grad():
        for output in call(model, inputs):
            if output.dtype != dtype:
                yield Measured.fault(f"a model of {dtype} returns {output.dtype}")
            if not output.isfinite().all():
                yield Measured.fault(f"a model of {dtype} returns values that are not finite")


def _converted(subject: Subject, dtype: torch.dtype) -> fx.GraphModule:
    return copy.deepcopy(subject.model).to(dtype)


@property_of("rounding", "rounds no more than its type", follows=("types",))
def rounding(subject: Subject) -> Iterator[Measured]:
    """float32 and bfloat16 compared to float64, with the same experts; float32 rounds equally at every position."""
    exact, inputs, choices = _converted(subject, torch.float64), subject.inputs(), Choices()

    def run(model: fx.GraphModule, dtype: torch.dtype) -> list[Tensor]:
        with choices:
            return subject.run(cast(inputs, dtype), model)

    expected = run(exact, torch.float64)
    for dtype, limit in ((torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)):
        model = _converted(subject, dtype)
        runs = partial(run, exact, torch.float64), partial(run, model, dtype)
        where = partial(first_difference, exact, *runs, _wide, second=model, limit=limit)
        for reference, output in zip(expected, run(model, dtype), strict=True):
            error = _relative(output.double(), reference)
            name = name_of(dtype)
            detail = f"{name} differs from float64 by {error:.1e}, and rounding explains {limit:g}"
            yield Measured(error, detail, limit, where)
            if dtype == torch.float32 and reference.dim() == 3 and reference.size(1) > 4:
                yield _growth(output.double(), reference)


def _relative(output: Tensor, reference: Tensor) -> float:
    """Return the root mean square of the error, relative to the values', since single values cancel."""
    error = (output - reference).square().mean().sqrt() / reference.square().mean().sqrt().clamp(min=1e-9)
    return float("inf") if error.isnan() else float(error)


def _wide(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return b.double(), a.double()


def _growth(output: Tensor, reference: Tensor) -> Measured:
    """Compare the error of the last quarter of positions with the error of the first quarter."""
    part = reference.size(1) // 4
    first, last = (_relative(output[:, s], reference[:, s]) for s in (slice(part), slice(-part, None)))
    factor = last / max(first, 1e-8)
    return Measured(
        max(0.0, factor - GROWTH), f"float32 rounds late positions {factor:.0f} times as much as early ones"
    )


@property_of("inputs-kept", "changes no tensor that it is given")
def inputs_kept(subject: Subject) -> Iterator[Measured]:
    """Arguments of every module, compared after its forward."""
    model, received, changed = subject.model, dict[str, list[Tensor]](), dict[str, float]()

    def before(path: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        received[path] = [x.clone() for x in _tensors((args, kwargs))]

    def after(path: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        for x, old in zip(_tensors((args, kwargs)), received.pop(path), strict=True):
            error = distance(x.double(), old.double()) if not torch.equal(x, old) else 0.0
            changed.setdefault(path, error) if error else None

    handles = []
    for path, module in model.named_modules():
        if path:
            handles += [
                module.register_forward_pre_hook(partial(before, path), with_kwargs=True),
                module.register_forward_hook(partial(after, path), with_kwargs=True),
            ]
    with hooked(handles):
        subject.run(subject.inputs(padding="left"))
    for path, error in changed.items():
        yield Measured(error, f"`{path}` changes what it is given by {error:.1e}", 0.0, path)
    yield Measured(0.0, "")


def _tensors(nested: Any) -> list[Tensor]:
    return [value for value in leaves(nested) if isinstance(value, Tensor)]


@property_of("large", "stays finite at large numbers", follows=("types",))
def large(subject: Subject) -> Iterator[Measured]:
    """Vectors that enter a stack times 1000, in the forward and in the gradients; float16."""
    if not subject.stacks:
        raise DoesNotApplyError("the spec has no stack")
    model = copy.deepcopy(subject.model)
    for stack in subject.stacks:
        model.get_submodule(stack.name).register_forward_pre_hook(lambda _, args: (args[0] * LARGE, *args[1:]))
    outputs = call(model, subject.inputs())
    torch.stack([output.square().mean() for output in outputs]).sum().backward()
    wild = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if not all(output.isfinite().all() for output in outputs):
        yield Measured.fault(f"outputs are not finite where a stack's input is {LARGE:g} times as large")
    elif wild:
        yield Measured.fault(
            f"the gradient of `{wild[0]}` is not finite where a stack's input is {LARGE:g} times as large",
            wild[0].rpartition(".")[0],
        )
    half = _converted(subject, torch.float16)
    for output in subject.run(cast(subject.inputs(), torch.float16), half):
        if not output.isfinite().all():
            yield Measured.fault("a model of torch.float16 returns values that are not finite")
    yield Measured(0.0, "")


@property_of("nothing-to-read", "reads no padding, without another key", follows=("extents",))
def nothing_to_read(subject: Subject) -> Iterator[Measured]:
    """Attention whose keys are all padding returns what it returns for values of zero, and has no gradient to them."""
    if not subject.attentions or not subject.padded:
        raise DoesNotApplyError("no attention may be without a key: nothing can be padded")
    calls = arguments(subject, subject.inputs(padding="rows"))
    for attention in subject.attentions:
        if attention.path not in calls:
            continue
        x, context, _ = calls[attention.path]
        if context.mask is None:
            continue
        yield from _unread(subject.model.get_submodule(attention.path), x, context, attention.path)


def _unread(module: nn.Module, x: Tensor, context: Context, path: str) -> Iterator[Measured]:
    """Measure the deviation of the last row, which is all padding, after its values change."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        memory = None if context.memory is None else context.memory.detach().requires_grad_()
        y = module(x, context if memory is None else context._replace(memory=memory))[-1]
        keys = x if memory is None else memory
        other = torch.zeros_like(keys)
        again = module(other if memory is None else x, context if memory is None else context._replace(memory=other))[
            -1
        ]
        (gradient,) = torch.autograd.grad(y.sum(), keys)
    if not (y.isfinite().all() and gradient.isfinite().all()):
        yield Measured.fault("a query without a key has values or gradients that are not finite", path)
        return
    error = distance(y, again)
    yield Measured(error, f"a query without a key reads padding: it changes by {error:.1e}", where=path)

"""Properties that all others require: the model is built and filled, it runs, and a second run gives equal outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tfkit.building.builder import assemble, build, inputs_of
from tfkit.building.initialize import initialize
from tfkit.building.placement import threads
from tfkit.errors import SpecError
from tfkit.graph.expand import Graph
from tfkit.tools.build.first_run import run_watched
from tfkit.tools.check.measure import Measured, in_words, property_of
from tfkit.tools.check.places import compared
from tfkit.tools.check.subject import Subject


@property_of("building", "is built", basic=True)
def building(subject: Subject) -> Iterator[Measured]:
    """A model can be built of the spec."""
    try:
        build(subject.graph, seed=subject.seed)
    except SpecError as error:
        yield Measured.fault(in_words(error))


@property_of("weights", "is filled from its seed alone", basic=True, of_weights=False)
def weights(subject: Subject) -> Iterator[Measured]:
    """Every parameter and buffer is filled from the seed: none is uninitialized, and one seed gives one model."""
    yield from filled(subject.graph)


def filled(graph: Graph) -> Iterator[Measured]:
    """Find parameters and buffers that are not filled when the model is built, or not from the seed.

    Buffers outside the state dict are included, and tensors that are neither are refused.
    """
    models = []
    for rubbish in (float("nan"), 0.0):
        with torch.device("meta"):
            model = assemble(graph)
        plain = [f"`{path}.{name}`" for path, module in model.named_modules() for name in _plain_tensors(module)]
        if plain:
            why = "is neither parameter nor buffer: it has no values once the model has memory"
            yield Measured.fault(f"{every_one(plain)} {why}")
            return
        model.to_empty(device="cpu")
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.fill_(rubbish if tensor.is_floating_point() else rubbish == 0)
        initialize(model, graph, seed=1)
        models.append(tensors)
    first, second = models
    empty = [f"`{name}`" for name, tensor in first.items() if not tensor.isfinite().all()]
    if empty:
        yield Measured.fault(f"{every_one(empty)} is not filled when the model is built")
    other = [f"`{name}`" for name, tensor in first.items() if not torch.equal(tensor, second[name])]
    if other and not empty:
        yield Measured.fault(f"{every_one(other)} differs when a model is built again")


def _plain_tensors(module: nn.Module) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, Tensor)]


def every_one(names: Sequence[str]) -> str:
    """Name several things by one of them, as the subject of a sentence."""
    return names[0] if len(names) == 1 else f"each of {', '.join(names)}"


@property_of("forward", "runs, and keeps shapes and types", basic=True)
def forward(subject: Subject) -> Iterator[Measured]:
    """A forward runs, and no component changes shape, type or input against its promise."""
    inputs = subject.inputs()
    try:
        run_watched(subject.model, {name: value for name, value in inputs.items() if name in inputs_of(subject.model)})
    except SpecError as error:
        yield Measured.fault(in_words(error))


@property_of("eval-mode", "returns equal bits, run again", basic=True)
def eval_mode(subject: Subject) -> Iterator[Measured]:
    """Nothing is random in eval mode: two forwards return the same bits, by one thread and by two."""
    run, detail = partial(subject.run, subject.inputs()), "something is random in eval mode: two forwards differ by {}"
    for number in (1, 2):
        with threads(number):
            yield from compared(subject.model, run, run, detail, limit=0.0)

"""Properties of a new model: it runs, returns equal bits in a second run, and starts as its spec declares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.building.builder import assemble_model, build, inputs_of
from tfkit.building.first_loss import first_losses
from tfkit.building.initialize import initialize
from tfkit.building.placement import thread_count
from tfkit.errors import SpecError
from tfkit.graph.expand import Graph
from tfkit.graph.wiring import heads_of_tables
from tfkit.nn import Linear, StackedLinear
from tfkit.tools.build.first_run import run_watched
from tfkit.tools.check.measure import Deviation, in_words, output_deviations, outputs_of, property_of, require
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.runs import call

SIGMAS = 6.0
"""Largest deviation of a weight's standard deviation from its declaration, in standard errors."""
NATS = 1.0
"""Largest excess of a first loss over the expected loss, in nats."""


@property_of("building", "is built", basic=True, of_spec=True)
def model_building(subject: ModelUnderTest) -> Iterator[Deviation]:
    """A model can be built from the spec."""
    try:
        build(subject.graph, seed=subject.seed)
    except SpecError as error:
        yield Deviation.fault(in_words(error))


@property_of("weights", "is filled from its seed alone", basic=True, of_weights=False)
def seeded_weights(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Every parameter and buffer is initialized, and equal seeds give equal models."""
    yield from unfilled_tensors(subject.graph)


def unfilled_tensors(graph: Graph) -> Iterator[Deviation]:
    """Find parameters and buffers that are not filled when the model is built, or not from the seed.

    Buffers outside the state dict are included; a tensor that is neither parameter nor buffer is a fault.
    """
    models = []
    for rubbish in (float("nan"), 0.0):
        with torch.device("meta"):
            model = assemble_model(graph)
        plain = [
            f"`{path}.{name}`"
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, Tensor)
        ]
        if plain:
            why = "is neither parameter nor buffer: it has no values once the model has memory"
            yield Deviation.fault(f"{each_of(plain)} {why}")
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
        yield Deviation.fault(f"{each_of(empty)} is not filled when the model is built")
    other = [f"`{name}`" for name, tensor in first.items() if not torch.equal(tensor, second[name])]
    if other and not empty:
        yield Deviation.fault(f"{each_of(other)} differs when a model is built again")


def each_of(names: Sequence[str]) -> str:
    """Return names as the subject of a singular verb: `a`, or `each of a, b`."""
    return names[0] if len(names) == 1 else f"each of {', '.join(names)}"


@property_of("forward", "runs, and keeps shapes and types", basic=True)
def forward_pass(subject: ModelUnderTest) -> Iterator[Deviation]:
    """A forward runs, and no component changes shape, type or input that it must keep."""
    inputs = subject.inputs()
    try:
        run_watched(subject.model, {name: value for name, value in inputs.items() if name in inputs_of(subject.model)})
    except SpecError as error:
        yield Deviation.fault(in_words(error))


@property_of("eval-mode", "returns equal bits, run again", basic=True)
def eval_mode(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Nothing is random in eval mode: two forwards return the same bits, by one thread and by two."""
    inputs, detail = subject.inputs(), "something is random in eval mode: two forwards differ by {}"
    for number in (1, 2):
        with thread_count(number):
            yield from output_deviations(subject.model, inputs, inputs, detail, limit=0.0)


@property_of("init", "has weights as its init declares", of_weights=False)
def declared_init(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Each matrix has the standard deviation of a matrix of the same role and shape that `init` fills separately.

    Whether a matrix writes to the residual stream follows from the outputs of a run instead of the module's attribute.
    """
    model, declared = build(subject.graph, seed=subject.seed), subject.graph.spec.model.init
    depths = {node.name: node.stack.depth if node.stack else None for node in subject.graph.nodes}
    tied = {f"{owner}.tokens" for owner in heads_of_tables(subject.graph)}
    writes = _writes_to_stream(subject)
    generator = torch.Generator().manual_seed(subject.seed + 1)
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            sample = torch.empty(4096, module.embedding_dim)
            (declared.tied_table if path in tied else declared.table)(sample, generator=generator)
            yield _spread_deviation(path, module.weight, sample)
        elif isinstance(module, Linear | StackedLinear):
            parts = list(module.parts.values()) if module.parts else [module.weight.size(-2)]
            residual, depth = writes.get(path, False), depths.get(path.partition(".")[0])
            for part in module.weight.split(parts, dim=-2):
                sample = torch.empty(part.size(-2), part.size(-1)).repeat(max(1, 4096 // part[..., 0].numel()), 1, 1)
                for matrix in sample:
                    declared.linear(matrix, residual=residual, n_layers=depth, generator=generator)
                yield _spread_deviation(path, part, sample)


def _writes_to_stream(subject: ModelUnderTest) -> dict[str, bool]:
    """Return for each linear layer of a sublayer whether its output is the output of the sublayer.

    Of stacked layers, such as experts, those write to the stream that return its width and take a different one. In a
    sublayer that ends with an operation on the outputs of its layers, the attribute `residual` decides.
    """
    sublayers = [f"{path}.{step.name}" for path, layer in subject.layers.items() for step in layer.steps]
    linear = {
        path: (module, owner)
        for path, module in subject.model.named_modules()
        for owner in sublayers
        if isinstance(module, Linear | StackedLinear) and path.startswith(f"{owner}.")
    }
    outputs = outputs_of(subject.model, partial(call, subject.model, subject.inputs()), [*sublayers, *linear])
    last = {
        owner: path
        for path, (_, owner) in linear.items()
        if path in outputs and owner in outputs and torch.equal(outputs[path], outputs[owner])
    }
    writes = {}
    for path, (module, owner) in linear.items():
        *_, d_out, d_in = module.weight.shape
        stacked = isinstance(module, StackedLinear) and owner in outputs and d_in != d_out
        if owner in last:
            writes[path] = last[owner] == path
        else:
            writes[path] = d_out == outputs[owner].size(-1) if stacked else module.residual
    return writes


def _spread_deviation(path: str, weight: Tensor, sample: Tensor) -> Deviation:
    """Compare the standard deviations of a weight and of a sample; the difference is in standard errors of both."""
    ours, theirs = float(weight.detach().std()), float(sample.std())
    allowed = SIGMAS * theirs * math.sqrt(0.5 / weight.numel() + 0.5 / sample.numel())
    detail = f"`{path}` has a spread of {ours:.3g}, but its init declares {theirs:.3g}"
    return Deviation(max(0.0, abs(ours - theirs) - allowed), detail, 0.0, path)


@property_of("first-loss", "starts at the expected loss", of_weights=False)
def first_loss(subject: ModelUnderTest) -> Iterator[Deviation]:
    """The loss of a new model does not exceed the loss that its spec predicts."""
    model = build(subject.graph, seed=subject.seed).eval()
    expected = {estimate.head: estimate for estimate in first_losses(model, subject.graph)}
    require(expected, "no head over a vocabulary returns logits")
    with torch.no_grad():
        outputs = dict(zip(subject.graph.outputs, call(model, subject.inputs(batch=8)), strict=True))
    for name, estimate in expected.items():
        if name in outputs:
            logits = outputs[name].flatten(0, -2).float()
            targets = torch.randint(logits.size(-1), logits.shape[:1], generator=torch.Generator().manual_seed(1))
            loss = float(F.cross_entropy(logits, targets))
            detail = f"the first loss of `{name}` is {loss:.2f}, but {estimate.loss:.2f} is expected"
            yield Deviation(max(0.0, loss - max(estimate.loss, estimate.even)), detail, NATS, name)

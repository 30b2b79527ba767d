"""Properties of a new model: the spread of its weights as its initialization declares them, and its first loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.builder import build
from tfkit.first_loss import first_losses
from tfkit.graph.wiring import heads_of_tables
from tfkit.nn import Linear, StackedLinear
from tfkit.tools.check.inputs import call
from tfkit.tools.check.measure import DoesNotApplyError, Measured, property_of
from tfkit.tools.check.subject import Subject

SIGMAS = 6.0
"""The largest deviation of a spread from the declared one, in standard errors."""
NATS = 1.0
"""The most by which a first loss may exceed the expected one."""


@property_of("init", "has weights as its init declares", of_weights=False)
def init(subject: Subject) -> Iterator[Measured]:
    """The spread that `init` gives to a matrix of the same role and shape, drawn separately."""
    model, declared = build(subject.graph, seed=subject.seed), subject.graph.spec.model.init
    depths = {node.name: node.stack.depth if node.stack else None for node in subject.graph.nodes}
    tied = {f"{owner}.tokens" for owner in heads_of_tables(subject.graph)}
    adding = tuple(f"{path}.{step.name}." for path, layer in subject.layers.items() for step in layer.steps)
    generator = torch.Generator().manual_seed(subject.seed + 1)
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            want = torch.empty(4096, module.embedding_dim)
            (declared.tied_table if path in tied else declared.table)(want, generator=generator)
            yield _spread(path, module.weight, want)
        elif isinstance(module, Linear | StackedLinear):
            parts = list(module.parts.values()) if module.parts else [module.weight.size(-2)]
            residual, depth = module.residual and path.startswith(adding), depths.get(path.partition(".")[0])
            for part in module.weight.split(parts, dim=-2):
                want = torch.empty(part.size(-2), part.size(-1)).repeat(max(1, 4096 // part[..., 0].numel()), 1, 1)
                for matrix in want:
                    declared.linear(matrix, residual=residual, n_layers=depth, generator=generator)
                yield _spread(path, part, want)


def _spread(path: str, weight: Tensor, sample: Tensor) -> Measured:
    """Measure how far the spread of a weight is from the spread of a sample, in standard errors of both."""
    ours, theirs = float(weight.detach().std()), float(sample.std())
    allowed = SIGMAS * theirs * math.sqrt(0.5 / weight.numel() + 0.5 / sample.numel())
    detail = f"`{path}` has a spread of {ours:.3g}, and its init declares {theirs:.3g}"
    return Measured(max(0.0, abs(ours - theirs) - allowed), detail, 0.0, path)


@property_of("first-loss", "starts at the expected loss", of_weights=False)
def first_loss(subject: Subject) -> Iterator[Measured]:
    """The loss of a new model is not above the one that its spec lets expect."""
    model = build(subject.graph, seed=subject.seed).eval()
    expected = {estimate.head: estimate for estimate in first_losses(model, subject.graph)}
    if not expected:
        raise DoesNotApplyError("no head over a vocabulary returns logits")
    with torch.no_grad():
        outputs = dict(zip(subject.graph.outputs, call(model, subject.inputs(batch=8)), strict=True))
    for name, estimate in expected.items():
        if name in outputs:
            logits = outputs[name].flatten(0, -2).float()
            targets = torch.randint(logits.size(-1), logits.shape[:1], generator=torch.Generator().manual_seed(1))
            loss = float(F.cross_entropy(logits, targets))
            detail = f"the first loss of `{name}` is {loss:.2f}, and {estimate.loss:.2f} is expected"
            yield Measured(max(0.0, loss - max(estimate.loss, estimate.even)), detail, NATS, name)

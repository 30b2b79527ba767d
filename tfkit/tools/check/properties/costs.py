"""Properties of counts: tools must report the parameters, operations and bytes that a model is observed to use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from tfkit.building.builder import build
from tfkit.component import Cached
from tfkit.decoding.cached import CachedModel
from tfkit.graph.decode_split import split_if_decodable
from tfkit.nn import StackedLinear
from tfkit.tools.check.measure import Deviation, DoesNotApplyError, property_of
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.runs import call
from tfkit.tools.cost.cost import Cost, UncountableError, cost
from tfkit.tools.cost.model_step import StepShape, make_inputs
from tfkit.tools.params.count import count_params

EXPERTS = 2e-2
"""Largest relative error of the saved bytes of experts: the count assumes that their load is even."""
STREAMS = 5e-2
"""Largest relative error of the saved bytes of residuals: the count misses copies of broadcast tensors."""


@property_of("counts", "has the parameters that are counted")
def parameter_counts(subject: ModelUnderTest) -> Iterator[Deviation]:
    """`tfkit params` counts exactly the parameters of the built model."""
    counted, model = count_params(subject.measured), subject.module or build(subject.graph, device="meta")
    total = sum(parameter.numel() for parameter in model.parameters())
    yield Deviation(
        abs(total - counted.total), f"{counted.total:,} parameters are counted, but the model has {total:,}", 0
    )
    of_rows = sum(row.parameters for row in counted.rows)
    yield Deviation(abs(total - of_rows), f"the rows of the count sum to {of_rows:,}, but the model has {total:,}", 0)


@property_of("flops", "costs the operations observed", of_spec=True)
def forward_flops(subject: ModelUnderTest) -> Iterator[Deviation]:
    """`tfkit cost` reports the FLOPs of a forward that torch counts on the meta device."""
    counted = _model_cost(subject, batch=2, mode="train").total.flops_forward
    shape = StepShape("train", 2, subject.length, None)
    model = build(subject.graph, device="meta").train()
    with FlopCounterMode(display=False) as counter:
        model(**make_inputs(subject.graph, shape, torch.float32))
    observed = counter.get_total_flops()
    error = abs(observed - counted) / max(1, observed)
    yield Deviation(error, f"{counted:,} FLOPs are counted for a forward, but {observed:,} observed", 1e-3)


def _model_cost(subject: ModelUnderTest, **options: Any) -> Cost:
    try:
        return cost(subject.measured, length=subject.length, dtype=torch.float32, **options)
    except UncountableError as error:
        raise DoesNotApplyError(error.diagnostics[0].message) from None


@property_of("saved-bytes", "saves the bytes that are counted")
def saved_bytes(subject: ModelUnderTest) -> Iterator[Deviation]:
    """`tfkit cost` reports the bytes that autograd saves in a forward in train mode; weights do not count."""
    counted = _model_cost(subject, batch=2, mode="train", kernels="cpu").memory.activations
    model = subject.with_full_chunks.build().train()
    saved = WeakValueDictionary[int, Tensor]()
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        copy = x.detach()  # a saved output would also keep the operation that saved it alive
        saved[id(copy)] = copy
        return copy

    with saved_tensors_hooks(keep, lambda x: x):
        outputs = call(model, subject.inputs(batch=2, images=1))  # the outputs hold the saved tensors
    storages = {storage.data_ptr(): storage.nbytes() for storage in (x.untyped_storage() for x in saved.values())}
    observed = sum(size for address, size in storages.items() if address not in weights)
    del outputs
    limit = EXPERTS if any(isinstance(module, StackedLinear) for module in model.modules()) else 0.0
    limit = (
        STREAMS
        if any(layer.around or any(step.read for step in layer.steps) for layer in subject.layers.values())
        else limit
    )
    error = abs(observed - counted) / max(1, observed)
    detail = f"{counted:,} bytes are counted as saved for the backward, but {observed:,} observed"
    yield Deviation(error, detail, limit)


@property_of("cache-bytes", "caches the bytes that are counted")
def cache_bytes(subject: ModelUnderTest) -> Iterator[Deviation]:
    """`tfkit params` reports the bytes of the caches of a `CachedModel`, without the padding slot of each cache."""
    parts = split_if_decodable(subject.graph)
    if parts is None:
        raise DoesNotApplyError("the model is not read in steps")
    counted = _model_cost(subject, batch=3, mode="decode").memory.cache
    cached, inputs = CachedModel(subject.model, length=subject.length), subject.inputs(images=1)
    cached.start(3, **{name: inputs[name] for name in parts.initial_inputs if name in inputs})
    padding = sum(3 * slot.heads * slot.width for slot in parts.cached if isinstance(slot, Cached)) * 4
    observed = cached.nbytes - padding
    yield Deviation(abs(observed - counted), f"{counted:,} bytes of caches are counted, but {observed:,} allocated", 0)

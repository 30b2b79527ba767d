"""A property of experts: outputs do not depend on their order."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

import tfkit
from tfkit.nn import StackedLinear
from tfkit_moe.moe import MoE


def expert_order(subject: tfkit.ModelUnderTest) -> Iterator[tfkit.Deviation]:
    """Compare outputs after reversing the experts and the rows of the router. Neighbours stay in one group."""
    model = copy.deepcopy(subject.model)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        raise tfkit.DoesNotApplyError("the spec has no mixture of experts")
    with torch.no_grad():
        for layer in layers:
            for part in (layer.router, *(module for module in layer.modules() if isinstance(module, StackedLinear))):
                for weight in part.parameters(recurse=False):
                    weight.copy_(weight.flip(0))
    inputs = subject.inputs()
    for reordered, want in zip(subject.run(inputs, model), subject.run(inputs), strict=True):
        error = float((reordered - want).abs().max() / want.abs().max().clamp(min=1))
        yield tfkit.Deviation(error, f"experts in another order change the outputs by {error:.1e}")

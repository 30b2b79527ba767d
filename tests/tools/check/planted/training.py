"""Bugs of training: dropout, layers that run again, gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.components import (
    head,
    stack,
)
from tfkit.tools.cost import shape_rules

from .bug import plant


@plant("dropout is never applied", "a module that nobody calls", "gpt2", "dropout", nn.Dropout, "forward")
def no_dropout(self: Any, x: Tensor) -> Tensor:
    return x


@plant("recomputed layers draw new dropout", "allenai/OLMo-core#828", "gpt2", "recompute", stack, "recomputed")
def drawn_anew(layer: nn.Module, *args: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)


@plant("the gradient of a tie is doubled", "pytorch/torchtitan#3174", "gpt2", "ties", head.TiedOutput, "forward")
def doubled(self: Any, x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight * 2 - weight.detach(), self.bias)


@plant(
    "tensors are counted as if none had its axes in another order",
    "a copy that autograd keeps",
    "llama",
    "kept-bytes",
    shape_rules,
    "like",
)
def in_one_order(one: Tensor, dtype: Any = None) -> Tensor:
    return shape_rules.empty(one.shape, dtype or one.dtype)

"""A dilated mask: each query attends to every n-th key. https://arxiv.org/abs/2004.05150, section 3.1

b batch, q queries, k keys.
"""

from __future__ import annotations

from typing import Literal

import tfkit
from torch import Tensor, nn


class TemplateConfig(tfkit.MaskRuleConfig):
    """Each query attends to the keys at a distance of 0, step, 2 * step, ..."""

    kind: Literal["template"] = "template"
    step: tfkit.Count = 2
    """Distance of two keys that a query attends to."""
    width: tfkit.Count = 16
    """Number of keys that a query attends to, its own among them."""

    @property
    def reach(self) -> int:
        return (self.width - 1) * self.step + 1

    def check(self) -> None:
        super().check()
        if self.step == 1:
            message = "`step` must be above 1: the rule is a sliding window otherwise"
            raise tfkit.Invalid("step", message, help="write `mask: {left: WIDTH - 1, right: 0}`")

    def build(self, make: tfkit.Make) -> nn.Module:
        return TemplateRule(self.step, self.reach)


class TemplateRule(nn.Module):
    """Positions of queries [b, q, 1] and of keys [b, 1, k] -> bool [b, q, k]."""

    def __init__(self, step: int, reach: int) -> None:
        super().__init__()
        self.step = step
        self.reach = reach

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (queries - keys).abs()
        return (distance % self.step == 0) & (distance < self.reach)


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(TemplateConfig)

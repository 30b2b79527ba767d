"""Bugs that are another object in place of a class or a property."""

from __future__ import annotations

from torch import nn

import tfkit.initialize
from tfkit.components import (
    rope_scaling,
)

from .bug import BUGS, Bug

BUGS += [
    Bug(
        "YaRN's factor of the softmax is missing",
        "onnxruntime/mobius#548",
        "yarn",
        "meaning",
        ((rope_scaling.YarnScalingConfig, "attention_factor", property(lambda config: 1.0)),),
    ),
    Bug(
        "the residual factor of an initialization is never applied",
        "huggingface/transformers#47458",
        "gpt2",
        "init",
        ((tfkit.initialize, "Linear", type("Unknown", (nn.Linear,), {})),),
    ),
]

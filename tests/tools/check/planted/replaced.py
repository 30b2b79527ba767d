"""Bugs that are another object in place of a class or a property."""

from __future__ import annotations

from torch import nn

import tfkit.building.initialize
from tfkit.components import (
    rope_scaling,
)
from tfkit.components.context import AttentionContext, ContextKey

from .bug import BUGS, Bug
from .masks import wider

window = ContextKey.window.fget  # type: ignore[attr-defined]


def one_more(key: ContextKey) -> int | None:
    size = window(key)
    return None if size is None else size + 1


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
        ((tfkit.building.initialize, "Linear", type("Unknown", (nn.Linear,), {})),),
    ),
    Bug(
        "the window is too wide in the mask and in the cache",
        "a number that both read",
        "mistral",
        "extents",
        ((AttentionContext, "visible", wider), (ContextKey, "window", property(one_more))),
    ),
]

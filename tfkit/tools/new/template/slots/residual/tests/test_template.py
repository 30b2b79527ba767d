"""The residual keeps every promise of tfkit, and is its formula; the spec builds."""

from typing import Any

import numpy as np
import tfkit
from tfkit.reference import Array, Part
from tfkit.testing import check_component

from tfkit_template import TemplateConfig


def reference(part: Part, step: str, stream: Array, *further: Any) -> Any:
    """Compute a module in the slowest way, for one sequence: one stream after the other, each [t, d_model]."""
    if step == "enter":
        return np.stack([stream] * part.config.streams, axis=1)
    if step == "leave":
        return sum(stream[:, n] for n in range(part.config.streams)) / part.config.streams
    weight = part.weight()
    if step == "read":
        return sum(weight[n] * stream[:, n] for n in range(part.config.streams)), None
    y, _ = further
    return np.stack([stream[:, n] + weight[n] * y for n in range(part.config.streams)], axis=1)


def test_it_keeps_every_promise() -> None:
    """Check it in a decoder, in an encoder and with a memory: at once, incrementally and with padding."""
    check_component(TemplateConfig, reference=reference)


def test_the_spec_generates() -> None:
    model = tfkit.build("template_tiny").eval()
    result = tfkit.generate(model, [[1, 2, 3]], max_new_tokens=4)
    assert len(result.tokens[0]) == 4

"""The mask rule has every property that tfkit guarantees, and is its formula; the spec builds."""

from typing import Any

import pytest
import tfkit
import torch
from tfkit.reference import Array, Part
from tfkit.testing import check_component

from tfkit_template import TemplateConfig


def reference(part: Part, queries: Array, keys: Array) -> Any:
    """Compute the rule in another way: positions of queries [q, 1] and keys [1, k] -> bool [q, k]."""
    fits = queries == keys
    for n in range(1, part.config.width):
        fits |= (queries == keys + n * part.config.step) | (keys == queries + n * part.config.step)
    return fits


def test_guarantees() -> None:
    """Check it in a decoder, in an encoder and with a memory: at once, incrementally and with padding."""
    check_component(TemplateConfig, fields={"step": 2, "width": 3}, reference=reference)


def test_the_cache_is_bounded() -> None:
    """Check that layers with the rule keep 31 positions of any number of tokens."""
    model = tfkit.build("template_tiny", sets=["decoder.layers=null"]).eval()
    cached = tfkit.CachedModel(model, length=100)
    cached(torch.zeros(1, 50, dtype=torch.long))
    assert cached.nbytes == 2 * 2 * (31 + 1) * 64 * 4  # layers, keys and values, slots, channels, bytes


def test_a_step_of_one_is_rejected() -> None:
    with pytest.raises(tfkit.SpecError, match="the rule is a sliding window"):
        tfkit.load("template_tiny", sets=["decoder.attention.mask.rule.step=1"])


def test_the_spec_generates() -> None:
    model = tfkit.build("template_tiny").eval()
    result = tfkit.generate(model, [[1, 2, 3]], max_new_tokens=4)
    assert len(result.tokens[0]) == 4

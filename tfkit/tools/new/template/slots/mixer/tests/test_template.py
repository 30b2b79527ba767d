"""The mixer has every property that tfkit guarantees, and is its formula; the spec builds."""

from typing import Any

import numpy as np
import tfkit
import torch
from tfkit.reference import Array, Part
from tfkit.testing import check_component

from tfkit_template import TemplateConfig


def reference(part: Part, x: Array) -> Any:
    """Compute the mixer in the slowest way: token by token, x [t, d_model]."""
    before, after, x = np.split(part.at("input").linear(x, bias=False), 3, axis=1)
    weight, state, rows = part.weight("weight"), np.zeros((part.config.size - 1, x.shape[1])), []
    for token in before * x:
        window = np.vstack((state, token))
        rows.append((window * weight.T).sum(axis=0))
        state = window[1:]
    return part.at("output").linear(after * np.array(rows), bias=False)


def test_it_has_every_property() -> None:
    """Check it in a decoder, in an encoder and with a memory: at once, incrementally and with padding."""
    check_component(TemplateConfig, reference=reference)


def test_its_state_is_small() -> None:
    """Check that the mixer keeps two positions of any number of tokens."""
    model = tfkit.build("template_tiny", sets=["decoder.layers=null"]).eval()
    cached = tfkit.CachedModel(model, length=100)
    cached(torch.zeros(1, 50, dtype=torch.long))
    assert cached.nbytes == 2 * 2 * 64 * 4  # layers, rows, channels, bytes


def test_the_spec_generates() -> None:
    model = tfkit.build("template_tiny").eval()
    result = tfkit.generate(model, [[1, 2, 3]], max_new_tokens=4)
    assert len(result.tokens[0]) == 4

"""Tests of the FFN against the guarantees of tfkit and against its formula, and of the spec."""

import pytest
import tfkit
import torch
from tfkit.testing import check_component

from tfkit_template import TemplateConfig


def test_guarantees() -> None:
    """Check the FFN in a decoder, in an encoder, and in a decoder with a memory."""
    check_component(TemplateConfig)


def test_formula() -> None:
    """Compare the FFN with a second implementation, element by element."""
    ffn = tfkit.build("template_tiny").eval().decoder.layers[0].ffn
    x = torch.randn(1, 1, 64)
    up = x[0, 0] @ ffn.up.weight.T + ffn.up.bias
    hidden = torch.stack([max(up[2 * f], up[2 * f + 1]) for f in range(128)])
    torch.testing.assert_close(ffn(x)[0, 0], hidden @ ffn.down.weight.T + ffn.down.bias)


def test_one_piece_is_rejected() -> None:
    with pytest.raises(tfkit.SpecError, match="the maximum of a single value is linear"):
        tfkit.load("template_tiny", sets=["decoder.ffn.n_pieces=1"])


def test_generate() -> None:
    model = tfkit.build("template_tiny").eval()
    result = tfkit.generate(model, [[1, 2, 3]], max_new_tokens=4)
    assert len(result.tokens[0]) == 4

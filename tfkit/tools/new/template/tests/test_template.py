"""The FFN keeps every promise of tfkit, and is its formula; the spec builds."""

import pytest
import tfkit
import torch
from tfkit.testing import check_component

from tfkit_template import TemplateConfig


def test_it_keeps_every_promise() -> None:
    """In a decoder, in an encoder, and beside a memory."""
    check_component(TemplateConfig)


def test_it_is_its_formula() -> None:
    """Written once more, in the slowest way."""
    ffn = tfkit.build("template_tiny").get_submodule("decoder.layers.0.ffn").eval()
    x = torch.randn(1, 1, 64)
    up = x[0, 0] @ ffn.up.weight.T + ffn.up.bias
    hidden = torch.stack([max(up[2 * f], up[2 * f + 1]) for f in range(128)])
    torch.testing.assert_close(ffn(x)[0, 0], hidden @ ffn.down.weight.T + ffn.down.bias)


def test_one_piece_is_refused() -> None:
    with pytest.raises(tfkit.SpecError, match="the FFN would be linear"):
        tfkit.load("template_tiny", sets=["decoder.ffn.n_pieces=1"])


def test_the_spec_generates() -> None:
    model = tfkit.build("template_tiny").eval()
    result = tfkit.generate(model, [[1, 2, 3]], max_new_tokens=4)
    assert len(result.tokens[0]) == 4

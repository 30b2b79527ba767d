"""The attention has every property that tfkit guarantees, and is its formula; the spec decodes with its cache."""

import tfkit
import torch
from tfkit.testing import check_component
from torch.nn import functional as F

from tfkit_template import TemplateConfig


def test_guarantees() -> None:
    """Check the attention in a decoder, in an encoder and with a memory: at once, incrementally and with padding."""
    check_component(TemplateConfig, fields={"position": "rope"})


def test_formula() -> None:
    """Compare the attention with the one of torch, whose queries and keys are normalized here."""
    model = tfkit.build("template_tiny", sets=["decoder.attention.position=null"]).eval()
    attention = model.decoder.layers[0].attention
    x, mask = torch.randn(2, 5, 64), torch.ones(5, 5).tril().bool()
    q, k, v = (layer(x).unflatten(2, (4, 16)).transpose(1, 2) for layer in (attention.q, attention.k, attention.v))
    q, k = attention.factor * q / q.norm(dim=3, keepdim=True), k / k.norm(dim=3, keepdim=True)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    expected = mixed.transpose(1, 2).flatten(2) @ attention.output.weight.T
    torch.testing.assert_close(attention(x, tfkit.Context(mask[None, None], None, None)), expected)


def test_values_inside() -> None:
    """Read the weights of each query: they sum to one, and none is on a later key."""
    model = tfkit.build("template_tiny").eval()
    with tfkit.trace(model, read="decoder.layers.1.attention.weights") as values:
        model(torch.randint(256, (2, 7)))
    (weights,) = values.values()
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4, 7))
    assert not weights.triu(1).any()


def test_generate() -> None:
    model = tfkit.build("template_tiny").eval()
    result = tfkit.generate(model, [[1, 2, 3]], max_new_tokens=4)
    assert len(result.tokens[0]) == 4

"""The activity of components, compared with hooks and loops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import tfkit

from .test_attention_weights import SPEC, TOKENS


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def test_the_numbers_equal_plain_hooks_and_ignore_padding() -> None:
    model = tfkit.build(tfkit.loads(SPEC)).eval()
    with torch.no_grad():
        model.get_submodule("decoder.layers.1.ffn.up").bias[:6] = -100.0
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    mask[0, 4:] = False
    numbers = tfkit.activity(model.train(), TOKENS, tokens_mask=mask)
    assert model.training
    values: dict[str, Tensor] = {}
    for name in ("embedding", "decoder.layers.0", "decoder.layers.1.ffn", "decoder.layers.1.attention.core"):
        model.get_submodule(name).register_forward_hook(lambda _m, _a, out, name=name: values.update({name: out}))
    with torch.no_grad():
        model.eval()(TOKENS, tokens_mask=mask)
    paths = {
        "rms/embedding": "embedding",
        "rms/decoder.layers.0.stream.out": "decoder.layers.0",
        "rms/decoder.layers.1.ffn.out": "decoder.layers.1.ffn",
    }
    for name, path in paths.items():
        assert math.isclose(numbers[name], rms(values[path][mask]), rel_tol=1e-5), name
    weights = tfkit.attention_weights(model, TOKENS, tokens_mask=mask)["decoder.layers.1.attention"]
    for head in range(2):
        of_head = values["decoder.layers.1.attention.core"][:, head]
        assert math.isclose(numbers[f"rms/decoder.layers.1.attention.heads.{head}"], rms(of_head[mask]), rel_tol=1e-5)
        entropy = sum(-float(w) * math.log(w) for row in weights[:, head][mask] for w in row if w > 0) / int(mask.sum())
        assert math.isclose(numbers[f"entropy/decoder.layers.1.attention.heads.{head}"], entropy, rel_tol=1e-5)
    assert numbers["dead/decoder.layers.1.ffn"] >= 6 / 24 > numbers["dead/decoder.layers.0.ffn"]
    weights_again = tfkit.attention_weights(model, TOKENS, tokens_mask=mask)  # the hooks are gone
    assert torch.equal(weights_again["decoder.layers.1.attention"], weights)

"""Attribution by patching: each effect equals a run with a hook of torch; estimates are products with gradients."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import tfkit

from .test_interventions import hooked, keeping, zero
from .test_trace import TOKENS, built, n_hooks

OTHER_TOKENS = TOKENS.clone()
OTHER_TOKENS[:, 2] = (OTHER_TOKENS[:, 2] + 5) % 11


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3].sum() - logits[:, -1, 4].sum()


def test_effects_equal_plain_hooks() -> None:
    model, names = built(), ["decoder.layers.*.stream.out", "decoder.layers.1.attention.heads.*"]
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    result = tfkit.attribution(model, names, TOKENS, {"tokens": OTHER_TOKENS}, metric)
    streams = [f"decoder.layers.{n}.stream.out" for n in (0, 1)]
    heads = [f"decoder.layers.1.attention.heads.{n}" for n in (0, 1)]
    assert list(result.effects) == [*streams, *heads]
    paths = {streams[0]: "decoder.layers.0", streams[1]: "decoder.layers.1"}
    paths |= dict.fromkeys(heads, "decoder.layers.1.attention.core")
    for name, path in paths.items():
        gradients: list[Tensor] = []
        with torch.no_grad(), hooked(model, path, keeping(gradients)):
            before, after = metric(model(TOKENS)), metric(model(OTHER_TOKENS))
        for position in range(6):
            index = (slice(None), int(name[-1]), position) if name in heads else (slice(None), position)
            with torch.no_grad(), hooked(model, path, zero(index, gradients[1][index])):
                effect = metric(model(TOKENS)) - before
            assert torch.equal(result.effects[name][position], effect), (name, position)
        assert not result.effects[name][:2].any()  # no token before position 2 differs
    assert (result.before, result.source) == (before.item(), after.item())
    assert result.effects[streams[0]][2] != 0
    torch.testing.assert_close(result.effects[streams[1]][-1], after - before)  # nothing else reaches the last logits


def test_an_estimate_is_the_change_times_the_gradient() -> None:
    model, name = built().requires_grad_(False), "decoder.layers.0.ffn.out"
    result = tfkit.attribution(model, name, TOKENS, OTHER_TOKENS, metric, gradient=True)
    values: list[Tensor] = []

    def leaf(value: Tensor) -> Tensor:
        values.append(value.detach().requires_grad_())
        return values[-1]

    with hooked(model, "decoder.layers.0.ffn", leaf):
        number, _ = metric(model(TOKENS)), model(OTHER_TOKENS)
    (gradient,) = torch.autograd.grad(number, values[0])
    expected = ((values[1] - values[0]) * gradient).sum((0, 2)).detach()
    torch.testing.assert_close(result.effects[name], expected)
    exact = tfkit.attribution(model, name, TOKENS, OTHER_TOKENS, metric).effects[name]
    assert (exact - expected)[2].abs() < 0.5 * exact[2].abs()
    assert n_hooks(model) == 0


def test_the_table_and_the_picture_have_each_effect() -> None:
    name = "decoder.layers.1.stream.out"
    result = tfkit.Attribution({name: torch.tensor([0.0, -1.0, 0.25])}, 1.0, 0.5)
    head, row = str(result).splitlines()
    assert head.split() == ["0", "1", "2"]
    assert row.split() == [name, "0", "-1", "0.25"]
    svg = ElementTree.fromstring(result.to_svg())
    space = {"s": "http://www.w3.org/2000/svg"}
    paths = [
        (path.get("class"), path.get("stroke-opacity"), path.get("d")) for path in svg.iterfind(".//s:path", space)
    ]
    assert paths == [("map low", "1", "M1 0.5h1"), ("map high", "0.25", "M2 0.5h1")]
    assert [text.text for text in svg.iterfind(".//s:text", space)][1:] == [name, "0", "1", "2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": "decoder.layers.*.streams.out"}, "similar name exists: `decoder.layers.*.stream.out`"),
        ({"names": "logits"}, "`logits` must be a value of a layer, with positions"),
        ({"source": TOKENS[:, :5]}, "`inputs` and `source` must have the same sizes; the sizes of `decoder.layers.0.s"),
        ({"metric": lambda y: y[:, -1]}, "`metric` must return one number; got"),
        ({"metric": lambda y: y.sum().item(), "gradient": True}, "`metric` must be differentiable"),
    ],
)
def test_a_wrong_argument_is_an_error(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "names": "decoder.layers.*.stream.out",
        "inputs": TOKENS,
        "source": OTHER_TOKENS,
        "metric": metric,
    } | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        tfkit.attribution(built(), **arguments)

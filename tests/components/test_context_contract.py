"""The contract of contexts with attention and its position, tested with kinds from outside tfkit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.components.flex import FlexMask

from .attentions import run_flex_on_the_cpu, spec


class FallConfig(tfkit.ScoreBiasConfig):
    """Half the distance off every score."""

    kind: Literal["fall"] = "fall"

    def build(self, make: tfkit.Make, attention: tfkit.AttentionConfig, causal: bool) -> nn.Module:
        return Fall(attention.n_heads)

    def slopes(self, attention: tfkit.AttentionConfig) -> Sequence[float]:
        return [0.5] * attention.n_heads


class Fall(nn.Module):
    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (queries[:, None, :, None] - keys[:, None, None, :]).abs().float()
        return -0.5 * distance.expand(-1, self.n_heads, -1, -1)


class AbsoluteConfig(tfkit.AttentionConfig):
    """Weighs what it reads by the angle at which it stands, and by a temperature."""

    kind: Literal["absolute"] = "absolute"
    heat: tfkit.TemperatureConfig | None = None
    """Multiplies the result."""
    self_attention_only = MappingProxyType(
        {**tfkit.AttentionConfig.self_attention_only, "heat": "a memory has no temperature"}
    )

    @property
    def counts_tokens(self) -> bool:
        return True

    @property
    def query_temperature(self) -> tfkit.TemperatureConfig | None:
        return self.heat

    def build(self, make: tfkit.Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        return Absolute(self)


class Absolute(nn.Module):
    def __init__(self, config: AbsoluteConfig) -> None:
        super().__init__()
        self.output = tfkit.Linear(config.d_model, config.d_model, bias=False, residual=True)

    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        y = self.output(x)
        if context.rotary is not None:
            y = y * context.rotary[0][:, 0, :, :1]
        temperature = context.temperature
        return y if temperature is None else y * temperature[:, 0]


PLUGINS = tfkit.load_plugins(entry_points=False)
for _config in (FallConfig, AbsoluteConfig):
    PLUGINS.registry.add(_config, "under test")
TOKENS = torch.arange(10).view(2, 5)


def graph_of(attention: Mapping[str, Any], layout: str = "decoder") -> tfkit.Graph:
    return spec(layout, attention, plugins=PLUGINS)


def test_a_position_with_slopes_is_a_rule_of_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of({"position": "fall", "d_head": 16})
    dense, flex = (tfkit.build(graph, attention_backend=backend).eval() for backend in ("sdpa", "flex"))
    arguments: list[Any] = []
    core = flex.get_submodule("stack.layers.0.attention.core")
    core.register_forward_pre_hook(lambda module, args: arguments.append(args[3]))
    run_flex_on_the_cpu(monkeypatch)
    torch.testing.assert_close(flex(TOKENS), dense(TOKENS), rtol=1e-4, atol=1e-5)
    assert isinstance(arguments[0], FlexMask)
    assert arguments[0].slopes.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("options", [{"position": "rope"}, {"heat": {"beta": 0.5, "original_max_len": 2}}])
def test_padding_does_not_count_where_tokens_stand(options: dict[str, Any]) -> None:
    model = tfkit.build(graph_of({"kind": "absolute", **options})).eval()
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), TOKENS), dim=1)
    mask = torch.arange(8).expand(2, -1) >= 3
    torch.testing.assert_close(model(padded, mask)[:, 3:], model(TOKENS))


def test_a_temperature_comes_by_any_name() -> None:
    plain, hot = ({}, {"heat": {"beta": 0.5, "original_max_len": 2}})
    first, second = (tfkit.build(graph_of({"kind": "absolute", **value})).eval()(TOKENS) for value in (plain, hot))
    assert torch.equal(first[:, :2], second[:, :2])
    assert not torch.equal(first[:, 2:], second[:, 2:])


def test_what_only_self_attention_has() -> None:
    heat = {"kind": "absolute", "n_heads": 2, "heat": {"beta": 0.5, "original_max_len": 2}}
    stack = graph_of(heat, "memory").node("stack").config
    assert stack.attention.heat is not None
    assert stack.cross().heat is None
    assert stack.cross().mask is None
    with pytest.raises(tfkit.Invalid, match="a memory has no temperature") as raised:
        stack.model_copy(update={"cross_attention": stack.attention}).check()
    assert raised.value.field == "cross_attention.heat"

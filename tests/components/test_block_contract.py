"""Components that differ from the built-in components: a memory of any name, an FFN with the context, a depth."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

import tfkit
from tfkit import Decoding, Signal, Signals
from tfkit.testing import check_cached, check_model, example_inputs


class RecallConfig(tfkit.BlockConfig):
    """Each position attends to all positions of a source."""

    block: Literal["recall"] = "recall"
    input: tfkit.MaskedWire | None = None
    source: tfkit.MemoryWire
    d_model: tfkit.Shared[tfkit.Dim]

    def output(self, inputs: Signals) -> Signal:
        tfkit.expect(inputs, "source", "sequence")
        return tfkit.expect(inputs, "input", "sequence", width=self.d_model)

    def decoding(self, inputs: Signals) -> Decoding:
        return Decoding(memory_caches=((tfkit.Cached(1, self.d_model),),))

    def build(self, make: tfkit.Make, inputs: Signals) -> nn.Module:
        return Recall(self.d_model, inputs["source"].width)


class Recall(nn.Module):
    def __init__(self, d_model: int, d_source: int) -> None:
        super().__init__()
        self.key = tfkit.Linear(d_source, d_model, bias=False)
        self.softmax = tfkit.Softmax()

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        memory_caches: list[list[Tensor]] | None = None,
    ) -> Tensor:
        if source is not None:
            keys = self.key(source)[:, None]
            if memory_caches is not None:
                memory_caches[0][0].copy_(keys)
        else:
            assert memory_caches is not None
            keys = memory_caches[0][0]
        visible = None if source_mask is None else source_mask[:, None, None].bool()
        return x + (self.softmax(x[:, None] @ keys.mT, visible) @ keys)[:, 0]


class ContextualConfig(tfkit.FFNConfig):
    """A linear layer that may use the context of the layer."""

    kind: Literal["contextual"] = "contextual"
    takes_context = True

    @property
    def cached(self) -> tuple[tfkit.Cached, ...]:
        return ()

    def build(self, make: tfkit.Make) -> nn.Module:
        return Contextual(self.d_model)


class Contextual(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.output = tfkit.Linear(d_model, d_model, bias=True, residual=True)

    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        return self.output(x)


class ScaledByDepthConfig(tfkit.FFNConfig):
    """A linear layer whose output is divided by the depth of the stack."""

    kind: Literal["scaled_by_depth"] = "scaled_by_depth"

    def build(self, make: tfkit.Make) -> nn.Module:
        return ScaledByDepth(self.d_model, make.layer, make.n_layers)


class ScaledByDepth(nn.Module):
    def __init__(self, d_model: int, layer: int | None, n_layers: int | None) -> None:
        super().__init__()
        assert n_layers is not None
        self.layer = layer
        self.scale = 1 / n_layers
        self.output = tfkit.Linear(d_model, d_model, bias=True, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.output(x)


PLUGINS = tfkit.load_plugins(entry_points=False)
for _config in (RecallConfig, ContextualConfig, ScaledByDepthConfig):
    PLUGINS.registry.add(_config, "under test")


def graph(**sizes: int) -> tfkit.Graph:
    nodes: dict[str, Any] = {
        "embedding": {"block": "embedding", "input": "tokens"},
        "recall": {"block": "recall", "source": "pages"},
        "decoder": {"block": "decoder", "n_layers": 2, "attention": {"n_heads": 2}, "ffn": {"kind": "contextual"}},
        "logits": {"block": "lm_head"},
    }
    inputs = {"tokens": "tokens", "pages": {"type": "features", "width": 12, **sizes}}
    head = {"tfkit": 1, "name": "recalling", "d_model": 16, "vocab_size": 23, "max_len": 20}
    return tfkit.load({**head, "inputs": inputs, "graph": nodes}, plugins=PLUGINS)


def test_a_memory_of_any_name_is_cached() -> None:
    check_cached(tfkit.build(graph(), seed=1).eval(), example_inputs(graph(), length=13))


def test_cost_counts_a_memory_of_any_name() -> None:
    plain, fixed = (tfkit.cost(graph(**sizes), length=5, mode="decode").memory.cache for sizes in ({}, {"length": 9}))
    assert fixed - plain == (9 - 5) * 16 * 2


def test_an_ffn_with_a_context_is_not_called_without_it() -> None:
    check_model(graph(), plugins=PLUGINS, only=["position-wise"])


def test_a_component_has_the_depth_of_its_stack() -> None:
    """Layers that share weights count each time that they run."""
    text = """
tfkit: 1
name: deep
d_model: 16
vocab_size: 23
graph:
  embedding: embedding
  decoder:
    block: decoder
    n_layers: 6
    attention: {kind: mha, n_heads: 2, position: rope}
    ffn: scaled_by_depth
    layers: {groups: 2}
  head: lm_head
"""
    graph = tfkit.loads(text, plugins=PLUGINS)
    model = tfkit.build(graph)
    assert [(layer.ffn.layer, layer.ffn.scale) for layer in model.decoder.layers] == [(0, 1 / 6), (1, 1 / 6)]
    check_model(graph, only=["look-ahead", "meaning", "recompute"], plugins=PLUGINS)

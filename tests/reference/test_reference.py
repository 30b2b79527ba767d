"""The reference alone: kinds of plugins, its trace, and its errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.reference import BUILT_IN, Part, Scope, UnknownKind, multi_head, run, softmax
from tfkit.testing import example_inputs

from .agreement import check_agreement, fill, first_difference, observe

PLUGINS = tfkit.load_plugins(entry_points=False)
Array = np.ndarray[Any, Any]


def load(attention: dict[str, Any], plugins: tfkit.Plugins) -> tfkit.Graph:
    stack = {"block": "decoder", "n_layers": 1, "attention": attention, "ffn": {"kind": "relu", "d_ff": 8}}
    graph = {"embedding": {"block": "embedding"}, "decoder": stack}
    return tfkit.load({"tfkit": 1, "name": "tiny", "d_model": 8, "vocab_size": 5, "graph": graph}, plugins=plugins)


GRAPH = load({"kind": "mha", "n_heads": 2}, PLUGINS)
TOKENS = np.array([[1, 2, 3], [4, 0, 1]])


def filled() -> tuple[nn.Module, dict[str, Array]]:
    model = tfkit.build(GRAPH).double().eval()
    fill(model)
    return model, {name: tensor.numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("slot", BUILT_IN)
def test_every_built_in_kind_is_defined(slot: str) -> None:
    assert {*BUILT_IN[slot]} == {*PLUGINS.registry.kinds(slot)}


def test_the_trace_leads_to_the_first_component_that_differs() -> None:
    model, weights = filled()
    _, records = observe(model, {"tokens": torch.from_numpy(TOKENS)})
    trace = run(GRAPH, weights, {"tokens": TOKENS}).trace
    assert {path for path, _ in trace} >= {"embedding", "decoder.layers.0.attention", "decoder.layers.0.ffn"}
    assert first_difference(records, trace, {}) is None
    records["decoder.layers.0.ffn.up"][0][0, 2, 1] += 1e-6
    records["decoder.layers.0"][0][0, 2, 1] += 1e-6
    assert first_difference(records, trace, {}) == "decoder.layers.0.ffn.up"


# ---- a kind of a plugin ----


class NearestConfig(tfkit.MultiHeadConfig):
    """Scores are minus the distance of query and key, times a learned factor."""

    kind: Literal["nearest"] = "nearest"

    def build_core(self, make: tfkit.Make, *, causal: bool) -> nn.Module:
        return Nearest(self.n_heads)


class Nearest(nn.Module):
    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(n_heads, 1, 1))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.factor)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = -torch.cdist(q, k) * self.factor
        return torch.softmax(scores if mask is None else scores + mask, -1) @ v


def by_distance(part: Part, q: Array, k: Array, v: Array, bias: Array, visible: Array) -> Array:
    heads, factor = [], part.weight("core.factor")
    for h in range(len(q)):
        scores = [[-factor[h, 0, 0] * np.linalg.norm(query - key) for key in k[h]] for query in q[h]]
        heads.append(softmax(np.array(scores) + bias[h], visible) @ v[h])
    return np.stack(heads, axis=1)


def nearest(part: Part, x: Array, scope: Scope) -> Array:
    return multi_head(part, x, scope, part.config.n_heads, by_distance)


def without_distance(part: Part, x: Array, scope: Scope) -> Array:
    return nearest(part, x, replace(scope, position=None))


def of_a_plugin() -> tfkit.Graph:
    plugins = tfkit.load_plugins(entry_points=False)
    plugins.registry.add(NearestConfig, "a test")
    return load({"kind": "nearest", "n_heads": 2, "position": "alibi"}, plugins)


def test_an_author_defines_a_kind() -> None:
    graph = of_a_plugin()
    check_agreement(graph, example_inputs(graph, padding="right"), kinds={"attention": {"nearest": nearest}})
    with pytest.raises(AssertionError, match=r"differs by .*, first at decoder\.layers\.0\.attention\.output"):
        check_agreement(graph, example_inputs(graph), kinds={"attention": {"nearest": without_distance}})


def test_a_kind_that_nobody_defined() -> None:
    graph = of_a_plugin()
    with pytest.raises(UnknownKind, match="no function defines attention `nearest`: give one, kinds=") as caught:
        check_agreement(graph, example_inputs(graph))
    assert (caught.value.slot, caught.value.kind) == ("attention", "nearest")


# ---- errors ----


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "inputs that are missing, or not of this model: tokens"),
        ({"tokens": TOKENS, "tokns_mask": TOKENS}, "not of this model: tokns_mask"),
        ({"tokens": TOKENS - 1}, "got 0 to 2|got -1 to 3"),
        ({"tokens": TOKENS + 1}, "must be from 0 to 4, the rows of the table; got 1 to 5"),
    ],
)
def test_inputs_that_the_model_does_not_take(inputs: dict[str, Array], message: str) -> None:
    _, weights = filled()
    with pytest.raises(ValueError, match=message):
        run(GRAPH, weights, inputs)


def test_weights_that_do_not_fit() -> None:
    _, weights = filled()
    weights["decoder.extra"] = weights.pop("embedding.tokens.weight")
    with pytest.raises(ValueError, match=r"`embedding\.tokens\.weight` is missing in the weights"):
        run(GRAPH, weights, {"tokens": TOKENS})
    weights["embedding.tokens.weight"] = weights["decoder.extra"]
    with pytest.raises(ValueError, match=r"the spec has no component for the weights decoder\.extra"):
        run(GRAPH, weights, {"tokens": TOKENS})
    with pytest.raises(TypeError, match="`weights` of `run` must be a mapping of a string to an array; got"):
        run(GRAPH, [1], {"tokens": TOKENS})

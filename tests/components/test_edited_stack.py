"""Layers of a built stack that are replaced, added and removed, as in any `nn.ModuleList`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.torch_private.torchscript import no_deprecation_warnings
from tools.edits import SETS, Layer

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [9, 2, 6, 5, 3, 5]])


def built(*sets: str) -> Any:
    return tfkit.build(tfkit.load("gpt2", sets=[*SETS, *sets]), seed=1).eval()


def mixed() -> Any:
    """Return a model whose middle layer has a window."""
    layers = "decoder.layers={variants: {near: {attention: {mask: {left: 1, right: 0}}}}, pattern: [base, near, base]}"
    return built(layers)


def by_hand(model: Any, layers: list[Any]) -> Tensor:
    x = model.embedding(TOKENS)
    (context,) = model.decoder.contexts(x, None, None, None, None)
    for layer in layers:
        x = layer(x, context)
    return model.decoder.final_norm(x) @ model.embedding.tokens.weight.T


@torch.no_grad()
def test_layers_are_added_removed_and_exchanged() -> None:
    model = built()
    first, second, third = model.decoder.layers
    model.decoder.layers.append(extra := copy.deepcopy(second))
    torch.testing.assert_close(model(TOKENS), by_hand(model, [first, second, third, extra]))
    del model.decoder.layers[1]
    torch.testing.assert_close(model(TOKENS), by_hand(model, [first, third, extra]))
    del model.decoder.layers[1:]
    torch.testing.assert_close(model(TOKENS), by_hand(model, [first]))
    model.decoder.layers.extend([third, plain := Layer()])
    torch.testing.assert_close(model(TOKENS), by_hand(model, [first, third, plain]))
    model.decoder.layers.insert(0, second)
    model.decoder.layers[3] = extra
    layers = [second, first, third, extra]
    with no_deprecation_warnings():
        scripted = torch.jit.script(model)
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), scripted):
        torch.testing.assert_close(same(TOKENS), by_hand(model, layers))


@torch.no_grad()
def test_a_layer_takes_the_context_of_its_index() -> None:
    model = mixed()
    assert model.decoder.context_of == [0, 1, 0]
    expected = model(TOKENS)
    model.decoder.layers[1] = copy.deepcopy(model.decoder.layers[1])
    assert torch.equal(model(TOKENS), expected)


def test_layers_with_different_contexts_are_not_added_or_removed() -> None:
    for edit in (lambda m: m.decoder.layers.__delitem__(0), lambda m: m.decoder.layers.append(Layer())):
        model = mixed()
        edit(model)
        with pytest.raises(TypeError, match="the layers of this stack have an order, different contexts or tensors"):
            model(TOKENS)


def test_a_module_that_takes_no_context_is_named() -> None:
    model = built()
    model.decoder.layers[1] = nn.Linear(12, 12)
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given") as error:
        model(TOKENS)
    assert error.value.__notes__ == ["in decoder.layers.1"]

"""Errors inside a forward name the module in which they occur."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import tfkit

SETS = ["d_model=16", "vocab_size=13", "max_len=32", "decoder.n_layers=3", "decoder.attention.n_heads=2"]
TOKENS = torch.arange(6)[None]

WAYS: dict[str, Callable[[fx.GraphModule], Any]] = {
    "forward": lambda model: model(TOKENS),
    "named": lambda model: model(tokens=TOKENS),
    "cached": lambda model: tfkit.CachedModel(model.eval())(TOKENS),
    "generate": lambda model: tfkit.generate(model.eval(), TOKENS, max_new_tokens=2),
    "loss": lambda model: tfkit.loss(model, TOKENS),
    "recomputed": lambda model: model.train()(TOKENS),
}


class Broken(nn.Module):
    """Fails, as a component of one's own may."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("out of paper")


def built(**options: Any) -> fx.GraphModule:
    return tfkit.build("gpt2", sets=[*SETS, "decoder.ffn.d_ff=24"], **options)


@pytest.mark.parametrize("way", WAYS)
def test_the_error_names_the_layer(way: str) -> None:
    model = built(recompute=way == "recomputed")
    model.set_submodule("decoder.layers.1.ffn", Broken())
    with pytest.raises(RuntimeError, match="out of paper") as caught:
        WAYS[way](model)
    assert caught.value.__notes__ == ["in decoder.layers.1.ffn"]
    del caught
    gc.collect()  # in torch 2.11, a layer that is recomputed stays under `checkpoint` as long as its error exists


def test_it_names_the_deepest_module() -> None:
    model = built()
    (name,) = [name for name, _ in model.named_modules() if name.startswith("decoder.layers.2.ffn.")][:1]
    model.get_submodule(name).weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(RuntimeError) as caught:
        model(TOKENS)
    assert caught.value.__notes__ == [f"in {name}"]


def test_what_is_wrong_with_the_inputs_is_said_as_before() -> None:
    with pytest.raises(ValueError, match="is not a token id of this model") as caught:
        built()(TOKENS + 100)
    assert not hasattr(caught.value, "__notes__")


def test_an_error_outside_of_all_modules_has_no_note() -> None:
    model = built()
    with model.graph.inserting_before(next(iter(model.graph.find_nodes(op="output")))):
        model.graph.call_function(Broken().forward, (None,))
    model.recompile()
    with pytest.raises(RuntimeError, match="out of paper") as caught:
        model(TOKENS)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("way", ["forward", "cached", "loss"])
def test_an_error_of_the_inputs_has_the_failure_as_its_cause(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TOKENS", torch.full((1, 6), 99))
    with pytest.raises(ValueError, match="99 is not a token id") as caught:
        WAYS[way](built())
    assert isinstance(caught.value.__cause__, IndexError)

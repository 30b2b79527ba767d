"""Edits of a built model: `save` writes no spec that describes another model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import tfkit
from tfkit.building.edits import _is_equal, copied_model, model_edits

SETS = ["d_model=12", "vocab_size=23", "decoder.n_layers=2", "decoder.attention.n_heads=3", "decoder.ffn.d_ff=20"]
TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def built(name: str = "gpt2", *sets: str, **options: Any) -> Any:
    return tfkit.build(tfkit.load(name, sets=[*SETS, *sets]), seed=1, **options).eval()


def change_graph(model: Any) -> None:
    (decoder,) = (node for node in model.graph.nodes if node.target == "decoder")
    with model.graph.inserting_after(decoder):
        negative = model.graph.call_function(torch.neg, (decoder,))
    decoder.replace_all_uses_with(negative, delete_user_cb=lambda user: user is not negative)
    model.recompile()


def double(module: nn.Module, inputs: Any, output: Any) -> Any:
    return 2 * output


EDITS: dict[str, Callable[[Any], object]] = {
    "decoder.layers.1.ffn.activation: ReLU, and GELU by the spec": lambda m: setattr(
        m.decoder.layers[1].ffn, "activation", nn.ReLU()
    ),
    "decoder.layers.1.ffn.activation.approximate: 'none', and 'tanh' by the spec": lambda m: setattr(
        m.decoder.layers[1].ffn.activation, "approximate", "none"
    ),
    "decoder.layers.0.attention.core.scale: 0.7, and 0.5 by the spec": lambda m: setattr(
        m.decoder.layers[0].attention.core, "scale", 0.7
    ),
    "decoder.final_norm.eps: 0.1, and 1e-05 by the spec": lambda m: setattr(m.decoder.final_norm, "eps", 0.1),
    "decoder.layers.0.attention.core.causal: False, and True by the spec": lambda m: setattr(
        m.decoder.layers[0].attention.core, "causal", False
    ),
    "decoder.layers.1.ffn.forward: replaced on the module": lambda m: setattr(
        m.decoder.layers[1].ffn, "forward", MethodType(lambda self, x: -x, m.decoder.layers[1].ffn)
    ),
    "decoder.layers.0.ffn: a forward hook, which can change its output": lambda m: m.decoder.layers[
        0
    ].ffn.register_forward_hook(double),
    "decoder.layers.0.ffn: a forward pre-hook, which can change its inputs": lambda m: m.decoder.layers[
        0
    ].ffn.register_forward_pre_hook(lambda module, inputs: (3 * inputs[0],)),
    "`model.code`: the code of the forward was changed": change_graph,
}
"""Changes that leave all names and shapes of tensors alone, by what is reported."""
TENSORS: dict[str, Callable[[Any], object]] = {
    "decoder.layers.1.ffn.up.weight: the tensor is missing": lambda m: m.decoder.layers.__delitem__(1),
    "decoder.layers.1.ffn.up.weight: [15, 12], and [20, 12] by the spec": lambda m: setattr(
        m.decoder.layers[1].ffn, "up", nn.Linear(12, 15)
    ),
    "decoder.layers.2.weight: a tensor that the spec does not have": lambda m: m.decoder.layers.append(nn.Linear(3, 5)),
    "decoder.layers.1.ffn.up.bias: the tensor is decoder.layers.0.ffn.up.bias, and a different tensor by the spec": (
        lambda m: setattr(m.decoder.layers[1].ffn.up, "bias", m.decoder.layers[0].ffn.up.bias)
    ),
}


@pytest.mark.parametrize("text", EDITS)
def test_a_changed_module_is_not_saved_as_its_spec(text: str, tmp_path: Path) -> None:
    model = built()
    before = model(TOKENS)
    EDITS[text](model)
    assert not torch.equal(model(TOKENS), before)
    assert model_edits(model) == [(text, False)]
    with pytest.raises(tfkit.SpecError) as error:
        tfkit.save(model, tmp_path / "out")
    assert "the model must compute what its spec `gpt2` describes; its modules were changed" in str(error.value)
    assert text in str(error.value)
    assert "allow_change=True" in str(error.value)
    tfkit.save(model, tmp_path / "out", allow_change=True)
    assert torch.equal(tfkit.build(tmp_path / "out").eval()(TOKENS), before)


@pytest.mark.parametrize("text", TENSORS)
def test_changed_tensors_are_never_saved(text: str, tmp_path: Path) -> None:
    model = built()
    TENSORS[text](model)
    assert (text, True) in model_edits(model)
    with pytest.raises(tfkit.SpecError, match="the model must have the tensors of `gpt2`; its modules were changed"):
        tfkit.save(model, tmp_path / "out", allow_change=True)
    assert not list(tmp_path.iterdir())


RENAMING: dict[str, Callable[[Any], object]] = {
    "remove the parametrizations first: `torch.nn.utils": lambda m: parametrize.register_parametrization(
        m.decoder.layers[1].ffn.down, "weight", nn.Tanh()
    ),
    "make the pruning permanent first: `torch.nn.utils.prune.remove`": lambda m: prune.random_unstructured(
        m.decoder.layers[1].ffn.down, "weight", 0.3
    ),
    "compile the module in place instead: `module.compile()`": lambda m: setattr(
        m.decoder.layers[1], "ffn", torch.compile(m.decoder.layers[1].ffn, backend="eager")
    ),
    "describe the change in the spec, and load the weights": lambda m: setattr(
        m.decoder.layers[1], "ffn", nn.Sequential(m.decoder.layers[1].ffn)
    ),
}


@pytest.mark.parametrize(
    "help", [pytest.param(help, marks=pytest.mark.slow if "compile" in help else []) for help in RENAMING]
)
def test_the_help_names_what_renamed_the_tensors(help: str) -> None:
    model = built()
    RENAMING[help](model)
    with pytest.raises(tfkit.SpecError, match=re.escape(f"help: {help}")):
        tfkit.save(model, "out", allow_change=True)


def test_the_root_has_no_name() -> None:
    model = built()
    model.forward = MethodType(lambda self, tokens: self.embedding(tokens), model)
    model.register_forward_hook(double)
    model.register_parameter("bias", nn.Parameter(torch.zeros(7)))
    assert [text for text, _ in model_edits(model)] == [
        "bias: a tensor that the spec does not have",
        "forward: replaced on the module",
        "the model: a forward hook, which can change its output",
    ]


class Packed(nn.Linear):
    """A layer whose state dict holds a tuple instead of a tensor, as the quantized layers of torch.ao do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"], destination[f"{prefix}bias"] = ("packed", 0.3), self.bias


def test_a_state_that_is_no_tensor_is_an_edit() -> None:
    model = built()
    model.decoder.layers[1].ffn.up = Packed(12, 20)
    assert model_edits(model) == [
        ("decoder.layers.1.ffn.up.weight: tuple, and a tensor by the spec", True),
        ("decoder.layers.1.ffn.up: Packed, and Linear by the spec", False),
    ]


def test_classes_of_one_name_are_told_apart() -> None:
    model = built()
    model.decoder.layers[1].ffn.up = nn.Linear(12, 20)
    assert model_edits(model) == [
        ("decoder.layers.1.ffn.up: torch.nn.modules.linear.Linear, and Linear by the spec", False)
    ]


def test_nan_equals_nan() -> None:
    assert _is_equal({"bound": float("nan")}, {"bound": float("nan")})
    assert not _is_equal({"bound": float("nan")}, {"bound": 0.3})


def test_several_differences_are_counted() -> None:
    model = built()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    with pytest.raises(tfkit.SpecError, match=r"embedding\.dropout\.p: 0\.3, and 0\.1 by the spec") as error:
        tfkit.save(model, "out")
    assert str(error.value).count("by the spec") == 5


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"attention_backend": "eager"}, {"recompute": True}])
def test_options_of_a_build_are_no_edits(options: dict[str, Any]) -> None:
    assert model_edits(built(**options)) == []


def test_use_of_a_model_is_no_edit() -> None:
    model = built()
    tfkit.generate(model, TOKENS, max_new_tokens=3)
    model.train()(TOKENS).sum().backward()
    model.decoder.layers[0].compile(backend="eager")
    model.requires_grad_(False)
    assert model_edits(model) == []


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_copy_has_the_frozen_parameters_of_the_model(device: str | None) -> None:
    model = built()
    model.decoder.layers[0].ffn.requires_grad_(False)
    copy = copied_model(model, device=device)
    trained, expected = (
        {name: parameter.requires_grad for name, parameter in module.named_parameters()} for module in (copy, model)
    )
    assert trained == expected
    assert {*trained.values()} == {False, True}

"""The parameters that decay, and AdamW, compared with torch's AdamW."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import tfkit
from tfkit.learning.adamw import adamw, parameter_groups
from tfkit.learning.loss import Loss, loss

from .models import SPECS, build, inputs_of

GAINS = '''
"""A norm whose gains are a matrix."""
from typing import Literal
import torch
import tfkit
from torch import nn

class GainsConfig(tfkit.NormConfig):
    """Two gains for every channel."""
    kind: Literal["gains"] = "gains"
    def build(self, make, width):
        return Gains(width)

class Gains(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, width))
    def reset_parameters(self):
        nn.init.ones_(self.weight)
    def forward(self, x):
        return x * self.weight.sum(dim=0)

@tfkit.hookimpl
def tfkit_register(register):
    register(GainsConfig)
'''


def decaying(model: nn.Module) -> set[str]:
    """The names of the parameters that decay; every parameter is in one group, and in no two."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    first, second = parameter_groups(model, weight_decay=0.3)
    parameters = [*first["params"], *second["params"]]
    assert len(parameters) == len(set(parameters)) == len(names)
    assert (first["weight_decay"], second["weight_decay"]) == (0.3, 0.0)
    return {names[parameter] for parameter in first["params"]}


@pytest.mark.parametrize("name", SPECS)
def test_linear_layers_decay_and_nothing_else(name: str) -> None:
    model = build(name)
    linear = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert decaying(model) == linear
    assert decaying(Loss(model)) == {f"model.{path}" for path in linear}


def test_the_groups_by_name() -> None:
    assert {re.sub(r"\d+", "N", name) for name in decaying(build("gpt2"))} == {
        "decoder.layers.N.attention.project.qkv.weight",
        "decoder.layers.N.attention.output.weight",
        "decoder.layers.N.ffn.up.weight",
        "decoder.layers.N.ffn.down.weight",
    }
    untied = decaying(build("llama_7b"))
    assert "logits.output.weight" in untied
    assert "embedding.tokens.weight" not in untied


def test_a_norm_of_a_plugin_whose_weight_is_a_matrix(tmp_path: Path) -> None:
    (tmp_path / "gains.py").write_text(GAINS, encoding="utf-8")
    plugins = tfkit.load_plugins(plugin_dirs=[tmp_path], entry_points=False)
    text = """
    {tfkit: 1, name: test, d_model: 8, vocab_size: 11, norm: gains, graph: {embedding: {block: embedding},
      decoder: {block: decoder, n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 12}}}}"""
    model = tfkit.build(tfkit.loads(text, plugins=plugins))
    gains = {name for name, parameter in model.named_parameters() if parameter.shape == (2, 8)}
    assert len(gains) == 3
    assert not gains & decaying(model)
    assert len(decaying(model)) == 4


def test_a_matrix_that_is_a_table_elsewhere() -> None:
    model = build("llama_7b")
    model.logits.output.weight = model.embedding.tokens.weight
    assert not {"logits.output.weight", "embedding.tokens.weight"} & decaying(model)
    by_hand = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Embedding(5, 3))
    by_hand[1].weight = by_hand[0].weight
    assert decaying(by_hand) == set()


# ---- AdamW ----


def test_adamw_takes_the_steps_of_torchs_own() -> None:
    model, inputs = build("llama_7b"), inputs_of("llama_7b")
    other = copy.deepcopy(model)
    linear = [module.weight for module in other.modules() if isinstance(module, nn.Linear)]
    rest = [parameter for parameter in other.parameters() if not any(parameter is weight for weight in linear)]
    expected = torch.optim.AdamW(
        [{"params": linear, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0}], lr=0.01, betas=(0.8, 0.9)
    )
    actual = adamw(model, 0.01, weight_decay=0.5, betas=(0.8, 0.9))
    for _ in range(3):
        for trained_model, optimizer in ((model, actual), (other, expected)):
            optimizer.zero_grad()
            loss(trained_model, inputs).backward()
            optimizer.step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()), atol=1e-5, rtol=1e-5)


def test_it_is_fused_where_that_is_possible() -> None:
    fused = [group["fused"] for group in adamw(build("gpt2"), 0.1).param_groups]
    assert fused == [True, True]
    meta = tfkit.build("gpt2", device="meta")
    assert [group["fused"] for group in adamw(meta, 0.1).param_groups] == [None, None]
    assert adamw(build("gpt2"), 0.1, fused=False).param_groups[0]["fused"] is False

"""Torch modules and tensors inside the component of a plugin: the ejected file contains all of them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

import tfkit
from tfkit.tools.eject.proof import Alone, check
from tfkit.tools.eject.runner import build_model, loaded_module
from tfkit.tools.eject.write import eject

from ...docs.page import ROOT, blocks
from ...sampling import chosen

PLUGIN = """
import copy
import math
from collections import OrderedDict
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit


class OddConfig(tfkit.FFNConfig):
    kind: Literal["odd"] = "odd"
    d_ff: tfkit.Dim

    def build(self, make):
        return Odd(self.d_model, self.d_ff)


class Own(nn.Module):
    def __init__(self, d, factor=2.0):
        super().__init__()
        self.linear = tfkit.Linear(d, d, bias=True)
        self.factor = factor

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        if extra is not None:
            x = x + extra
        return self.factor * self.linear(x)


class Other(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)

    def forward(self, hidden: Tensor, by: float = 1.0) -> Tensor:
        return by * self.norm(hidden)


class Stepped(nn.Module):
    def __init__(self, *steps):
        super().__init__()
        self.steps = list(steps)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = x + step
        return x


class Scaled(nn.Linear):
    pass


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = x + module(x)
        return x


class Chained(nn.Sequential):
    pass


class Each(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


class Odd(nn.Module):
    def __init__(self, d, d_ff):
        super().__init__()
        INIT


    def forward(self, x: Tensor) -> Tensor:
        BODY

    RESET


@tfkit.hookimpl
def tfkit_register(register):
    register(OddConfig)
"""
SPEC = """
tfkit: 1
name: mine
d_model: 8
vocab_size: 13
graph:
  embedding: {block: embedding}
  decoder: {block: decoder, n_layers: 1, sublayers: [ffn], ffn: {kind: odd, d_ff: 12}}
  logits: {block: lm_head}
"""
RESET = """
def reset_parameters(self):
    for one in self.parameters():
        nn.init.normal_(one)
"""
RESET_BUFFERS = """
def reset_parameters(self):
    self.a.fill_(2)
    self.b.copy_(torch.arange(self.b.size(0)))
"""


def graph_of(init: str, body: str, reset: str, folder: Path) -> tfkit.Graph:
    text = PLUGIN
    for word, code in (("        INIT", init), ("        BODY", body), ("    RESET", reset)):
        indent = " " * (len(word) - len(word.strip()))
        text = text.replace(word, textwrap.indent(textwrap.dedent(code).strip(), indent))
    (folder / "odd.py").write_text(text, encoding="utf-8")
    return tfkit.loads(SPEC, plugins=tfkit.load_plugins(plugin_dirs=[folder], entry_points=False))


CASES = {
    "sequential": ("self.net = nn.Sequential(nn.Linear(d, d_ff), nn.GELU(), nn.Linear(d_ff, d))", "return self.net(x)"),
    "sequential of own": ("self.net = nn.Sequential(Own(d), nn.Tanh(), Own(d, 3.0), Own(d))", "return self.net(x)"),
    "sequential by name": (
        "self.net = nn.Sequential(OrderedDict(up=nn.Linear(d, d_ff), act=nn.GELU(), down=Own(d_ff)))\n"
        "self.out = nn.Linear(d_ff, d)",
        "return self.out(self.net(x)) + self.net.up(x).sum()",
    ),
    "sequential in sequential": (
        "self.net = nn.Sequential(nn.Sequential(nn.Linear(d, d_ff), nn.ReLU()), nn.Sequential(nn.Linear(d_ff, d)))",
        "return self.net(x)",
    ),
    "empty sequential": ("self.net = nn.Sequential()\nself.out = nn.Linear(d, d)", "return self.out(self.net(x))"),
    "parts of a sequential": (
        "self.net = nn.Sequential(nn.Linear(d, d_ff), nn.GELU(), Own(d_ff), nn.Linear(d_ff, d))",
        "return self.net[-1](self.net[2](self.net[0](x), x.mean())) + len(self.net)",
    ),
    "loop over a sequential": (
        "self.net = nn.Sequential(nn.Linear(d, d), Own(d), nn.GELU())",
        "for one in self.net:\n    x = one(x)\nreturn x",
    ),
    "list of torch's": (
        "self.net = nn.ModuleList([nn.Linear(d, d), nn.LayerNorm(d), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d)])",
        "for one in self.net:\n    x = x + one(x)\nreturn x",
    ),
    "list of both": (
        "self.net = nn.ModuleList([nn.Linear(d, d), Own(d)])",
        "for i, one in enumerate(self.net):\n    x = one(x) + i\nreturn x",
    ),
    "list by index": (
        "self.net = nn.ModuleList([nn.Linear(d, d_ff), nn.Linear(d_ff, d)])",
        "return self.net[1](self.net[0](x))",
    ),
    "list of lists": (
        "self.net = nn.ModuleList([nn.ModuleList([Own(d), nn.GELU()]) for _ in range(2)])",
        "for pair in self.net:\n    for one in pair:\n        x = one(x)\nreturn x",
    ),
    "dict": (
        'self.net = nn.ModuleDict({"up": nn.Linear(d, d_ff), "a b": nn.Linear(d_ff, d)})',
        'return self.net["a b"](self.net["up"](x))',
    ),
    "dict of both": (
        'self.net = nn.ModuleDict({"own": Own(d), "theirs": nn.Linear(d, d)})',
        "for name, one in self.net.items():\n    x = one(x)\nfor one in self.net.values():\n    x = one(x)\nreturn x",
    ),
    "chained": ("self.net = Chained(nn.Linear(d, d), Own(d))", "return self.net(x)"),
    "doubled": ("self.net = Doubled(nn.Linear(d, d), Own(d))", "return self.net(x)"),
    "own list": ("self.net = Each([nn.Linear(d, d), Own(d)])", "return self.net(x)"),
    "linear": ("self.net = nn.Linear(d, d, bias=False)", "return self.net(x)"),
    "layernorm": ("self.net = nn.LayerNorm(d, eps=1e-3, bias=False)", "return self.net(x)"),
    "rmsnorm": ("self.net = nn.RMSNorm(d, eps=1e-3)", "return self.net(x)"),
    "groupnorm": ("self.net = nn.GroupNorm(2, d)", "return self.net(x.transpose(1, 2)).transpose(1, 2)"),
    "conv": (
        'self.net = nn.Conv1d(d, d, 3, padding="same", groups=2, bias=False, padding_mode="zeros")',
        "return self.net(x.transpose(1, 2)).transpose(1, 2)",
    ),
    "causal conv": (
        "self.net = nn.Conv1d(d, d, kernel_size=3, padding=2, dilation=1)",
        "return self.net(x.transpose(1, 2))[..., :-2].transpose(1, 2)",
    ),
    "attention": (
        "self.net = nn.MultiheadAttention(d, 2, dropout=0.1, bias=False, batch_first=True)",
        "return self.net(x, x, x, need_weights=False)[0]",
    ),
    "attention with all": (
        "self.net = nn.MultiheadAttention(d, 2, add_bias_kv=True, add_zero_attn=True, kdim=d, vdim=d)",
        "y, weights = self.net(x, x, x)\nreturn y",
    ),
    "torch's layer": (
        "self.net = nn.TransformerEncoderLayer(d, 2, d_ff, 0.0, activation=F.gelu, norm_first=True, batch_first=True)",
        "return self.net(x)",
    ),
    "torch's encoder": (
        "self.net = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 2, d_ff, 0.0, activation='gelu'), 2, "
        "enable_nested_tensor=False)",
        "return self.net(x)",
    ),
    "lstm": ("self.net = nn.LSTM(d, d, 2, batch_first=True)", "return self.net(x)[0]"),
    "gru": ("self.net = nn.GRU(d, d, bias=False)", "y, _ = self.net(x)\nreturn y"),
    "rnn": ('self.net = nn.RNN(d, d, nonlinearity="relu")', "y, _ = self.net(x)\nreturn y"),
    "bilinear": ("self.net = nn.Bilinear(d, d, d)", "return self.net(x, x)"),
    "prelu": ("self.net = nn.PReLU(d, init=0.1)", "return self.net(x.transpose(1, 2)).transpose(1, 2)"),
    "embedding": (
        "self.net = nn.Embedding(5, d, padding_idx=0)",
        "return x + self.net(torch.arange(x.size(1), device=x.device) % 5)",
    ),
    "activations": (
        "self.net = nn.Sequential(nn.GELU(approximate='tanh'), nn.LeakyReLU(0.2), nn.Hardtanh(-2.0, 3.0), "
        "nn.Softmax(-1), nn.Identity(), nn.Dropout(0.1), nn.Threshold(0.1, 0.2))\nself.out = nn.Linear(d, d)",
        "return self.out(self.net(x))",
    ),
    "flatten": (
        "self.net = nn.Sequential(nn.Unflatten(-1, (2, d // 2)), nn.Linear(d // 2, d // 2), nn.Flatten(-2))",
        "return self.net(x)",
    ),
    "copies": (
        "one = nn.Linear(d, d)\nself.net = nn.ModuleList(copy.deepcopy(one) for _ in range(3))",
        "for one in self.net:\n    x = one(x)\nreturn x",
    ),
    "frozen": (
        "self.net = nn.Sequential(nn.Linear(d, d), nn.LayerNorm(d))\nself.net[1].weight.requires_grad_(False)\n"
        "self.own = Own(d)\nself.own.linear.bias.requires_grad_(False)\n"
        "self.own_norm = nn.LayerNorm(d)\nself.own_norm.bias.requires_grad_(False)",  # begins with the name of a class
        "return self.own_norm(self.own(self.net(x)))",
    ),
    "classes that are not alike": (
        "self.net = nn.ModuleList([Own(d), Other(d), Other(d)])",
        "for one in reversed(self.net):\n    x = one(x)\nfor one in self.net[1:]:\n    x = one(x, 2.0)\nreturn x",
    ),
    "lists of different lengths": (
        "self.net = nn.ModuleList([Stepped(2, 3), Stepped(2, 3, 4)])\nself.out = nn.Linear(d, d)",
        "for one in self.net:\n    x = one(x)\nreturn self.out(x)",
    ),
    "a subclass of torch's": ("self.net = Scaled(d, d)", "return self.net(x)"),
    "a child that nobody calls": ("self.net = Own(d)\nself.spare = nn.Sequential(Own(d))", "return self.net(x)"),
}
TENSORS = {
    "parameters": (
        "self.a = nn.Parameter(torch.ones(d))\nself.b = nn.Parameter(torch.randn(d, 2 * d)[:, :d])\n"
        "self.c = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)\nself.register_parameter('e', None)",
        "return x @ self.b * self.a + self.c",
    ),
    "list of parameters": (
        "self.a = nn.ParameterList([torch.zeros(d), nn.Parameter(torch.ones(d, d))])",
        "for one in self.a:\n    x = x * one.sum()\nreturn x @ self.a[1] + self.a[0]",
    ),
    "dict of parameters": (
        'self.a = nn.ParameterDict({"w": torch.zeros(d, d), "b c": torch.ones(d)})',
        'return x @ self.a["w"] + self.a["b c"] + self.a.w.sum()',
    ),
    "buffers": (
        "self.register_buffer('a', torch.ones(d))\nself.register_buffer('b', torch.arange(d))\n"
        "self.register_buffer('c', None)\nself.net = nn.Linear(d, d)",
        "return self.net(x * self.a) + self.b",
    ),
}
QUICK_CASES = {"list of both", "buffers"}


@pytest.mark.parametrize("name", chosen(CASES | TENSORS, QUICK_CASES))
def test_the_ejected_file_is_the_model(name: str, tmp_path: Path, alone: Alone) -> None:
    init, body = (CASES | TENSORS)[name]
    reset = "" if name in CASES else RESET_BUFFERS if name == "buffers" else RESET
    graph = graph_of(init, body, reset, tmp_path)
    text = eject(graph)
    assert check(graph, text, alone).ran, text
    ours = tfkit.build(graph, device="meta")
    with loaded_module(text) as module, torch.device("meta"):
        theirs = build_model(module)
    trained = [{n: p.requires_grad for n, p in model.named_parameters()} for model in (ours, theirs)]
    assert trained[0] == trained[1]
    dtypes = [{n: b.dtype for n, b in model.named_buffers()} for model in (ours, theirs)]
    assert dtypes[0] == dtypes[1]


@pytest.mark.slow
def test_the_plugin_of_the_readme_leaves_too(tmp_path: Path, alone: Alone) -> None:
    (text,) = [block.text for block in blocks(ROOT / "README.md") if "tfkit_register" in block.text]
    (tmp_path / "double_gelu.py").write_text(text, encoding="utf-8")
    plugins = tfkit.load_plugins(plugin_dirs=[tmp_path], entry_points=False)
    graph = tfkit.loads(SPEC.replace("odd", "double_gelu"), plugins=plugins)
    written = eject(graph)
    assert check(graph, written, alone).ran
    assert "nn.Sequential(" in written
    assert "config.d_ff" in written


def test_a_buffer_that_no_file_keeps_is_filled(tmp_path: Path, alone: Alone) -> None:
    init, body = TENSORS["buffers"]
    graph = graph_of(
        init.replace("torch.arange(d)", "torch.arange(d), persistent=False"), body, RESET_BUFFERS, tmp_path
    )
    assert check(graph, eject(graph), alone).ran


def test_a_parameter_that_would_be_trained_is_found(tmp_path: Path, alone: Alone) -> None:
    graph = graph_of(*CASES["frozen"], "", tmp_path)
    written = eject(graph)
    ours = tfkit.build(graph, device="meta")
    with loaded_module(written) as module, torch.device("meta"):
        theirs = build_model(module)
    trained = [{n: p.requires_grad for n, p in model.named_parameters()} for model in (ours, theirs)]
    assert trained[0] == trained[1]
    assert ".requires_grad_(False)" in written
    with pytest.raises(tfkit.SpecError, match="it trains different parameters: it freezes none instead of"):
        check(graph, written.replace(".requires_grad_(False)", ".requires_grad_(True)"), alone)


@pytest.mark.parametrize(
    ("init", "body", "why"),
    [
        (
            "self.net = nn.Dropout(0.1)\nself.net.p = 0.2\nself.own = Own(d)",
            "return self.own(self.net(x))",
            "changed after",
        ),
        (
            "self.net = nn.utils.parametrizations.weight_norm(nn.Linear(d, d))",
            "return self.net(x)",
            "no public class of this name",
        ),
        ("self.net = nn.TransformerDecoder(Own(d), 1, Own(d))", "return self.net.norm(x)", "do not belong to torch"),
        (
            "self.net = nn.Sequential(nn.Linear(d, d), nn.Linear(d, d))\nself.net[1].weight = self.net[0].weight",
            "return self.net(x)",
            "one tensor under two names",
        ),
    ],
)
def test_what_a_file_cannot_say_is_refused(init: str, body: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(tfkit.SpecError, match=f"cannot be ejected: .*{why}"):
        eject(graph_of(init, body, "", tmp_path))

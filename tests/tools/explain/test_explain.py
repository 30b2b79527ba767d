"""`explain`: it describes every component by its docstring, and the costs add up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tfkit
from tests.small_specs import FEW, covering
from tfkit.cli import main
from tfkit.component import Component
from tfkit.components.attention import GroupedQueryConfig
from tfkit.components.embedding import EmbeddingConfig
from tfkit.tools.explain.command import lines_of
from tfkit.tools.explain.explain import Explained, Explanation, doc_of, explain, field_papers, papers_of, sentence

from ...sampling import some

PLUGIN = '''
"""A feed-forward network of one's own, https://example.org/whole; slow: https://example.org/slow."""
from typing import Literal
from torch import nn
import tfkit

class HalvesConfig(tfkit.FFNConfig):
    """Two halves that never meet: each has its own layer. More of it."""
    kind: Literal["halves"] = "halves"
    d_half: tfkit.Dim
    """Width of one half, https://example.org/half."""
    slow: bool = False
    """Whether it takes its time."""
    def build(self, make):
        return tfkit.Linear(self.d_model, self.d_model, bias=False)

@tfkit.hookimpl
def tfkit_register(register):
    register(HalvesConfig)
'''


def parts(explained: Explained) -> list[Explanation]:
    return [part for node in explained.nodes for part in node.walk()]


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", some(["gpt2", "t5_small", "gemma3_1b", "deepseek_v3"], 2))
def test_text(capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None], name: str) -> None:
    golden(f"explain/{name}", text_of(capsys, name))


@pytest.mark.parametrize("name", covering(*FEW[::4]))
def test_all_that_there_is(name: str) -> None:
    graph = tfkit.load(name)
    explained, model = explain(graph), tfkit.build(graph, device="meta")
    text = "\n".join(lines_of(explained))
    assert all(len(line) <= 80 for line in text.splitlines() if "://" not in line)
    assert sum(part.parameters for part in parts(explained)) == explained.parameters
    assert explained.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sum(part.flops for part in parts(explained)) == explained.flops > 0
    message = {(part.name, part.kind) for part in parts(explained)}
    kinds = {kind for _, kind in message}
    for path, config in model.meta["components"].items():
        if config.slot == "activation" and config.kind_name() not in kinds:  # part of what `gelu` and others are
            continue
        assert config.kind_name() in kinds, path
    for node in graph.nodes:
        assert any(line.startswith(node.name) for line in text.splitlines()), node.name
    assert f"\ninit ({graph.spec.model.init.kind_name()})" in text
    assert graph.spec.model.source is None or graph.spec.model.source in text


@pytest.mark.slow
def test_costs_stand_where_they_belong() -> None:
    """Dense and routed layers apart, T5's table below the attention that has it."""
    actual = {(part.name, part.kind): part for part in parts(explain(tfkit.load("deepseek_v3")))}
    assert actual["ffn", "swiglu"].parameters == 3 * 3 * 7168 * 18432
    assert actual["ffn", "swiglu"].where == "layers 0-2 (dense)"
    assert actual["ffn", "moe"].where == "layers 3-60 (base)"
    t5 = {(part.name, part.kind): part for part in parts(explain(tfkit.load("t5_small")))}
    assert t5["position", "t5"].parameters == 32 * 8


def test_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    llama = text_of(capsys, "llama3_8b")
    assert "32 query heads of width 128 share 8 key-value heads: the cache is 4 times\n      smaller" in llama
    assert "theta 500,000: Base of the geometric series of frequencies." in llama
    assert "d_ff 14,336, 3.5 x d_model" in llama
    assert "share 1 key-value head: the cache is 48 times" in text_of(capsys, "palm_540b")
    gemma = text_of(capsys, "gemma3_1b")
    assert "each token reads itself and the 511 before it" in gemma
    assert "in the pattern [local*5, base]: 22 local, 4 base" in gemma
    assert "the layers share one set of weights, each used 12 times in a row" in text_of(capsys, "albert_base")
    bert = text_of(capsys, "bert_base")
    assert "- each token reads all tokens" in bert
    assert "cache" not in bert


@pytest.mark.slow
def test_nothing_is_claimed_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The first sentences of docstrings say what a component can be; a model has one of them."""

    def said(name: str, *sets: str) -> dict[str, str]:
        actual = explain(tfkit.load(name, sets=sets))
        return {part.name: part.says for node in actual.nodes for part in node.walk()}

    gpt2 = said("gpt2")
    assert gpt2["embedding"] == "Token ids to vectors: the token table, plus positions."
    assert gpt2["logits"] == "Vectors to logits over the vocabulary: multiply by the output matrix."
    assert gpt2["decoder"] == "Layers with causal attention."
    llama = said("llama3_8b")
    assert llama["embedding"] == "Token ids to vectors: the token table."
    bert = said("bert_base")
    assert bert["embedding"].endswith(": the token table, plus positions, plus additional tables, normalized.")
    assert bert["logits"] == "Vectors to logits over the vocabulary: transform, multiply by the output matrix."
    pair = said("vaswani_base")
    assert "causal attention, and cross-attention to `encoder`." in pair["decoder"]
    assert pair["target_embedding"] == "Token ids to vectors: the token table, scaled, plus positions."
    olmo = said("olmo_1b")
    assert olmo["norm"] == "Subtract the mean, divide by the standard deviation."


@pytest.mark.parametrize(
    ("placement", "steps"),
    [
        ("pre", ["1. normalize (layernorm), attention, add to the stream"]),
        ("post", ["1. attention, add to the stream, normalize (layernorm)"]),
        ("sandwich", ["1. normalize (layernorm), attention, normalize (layernorm), add to the stream"]),
        ("output", ["1. attention, normalize (layernorm), add to the stream"]),
        (
            "parallel",
            [
                "1. normalize the layer's input (layernorm)",
                "2. attention of the layer's normalized input, add to the stream",
                "3. the FFN of the layer's normalized input, add to the stream",
            ],
        ),
    ],
)
def test_steps(placement: str, steps: list[str]) -> None:
    graph = tfkit.load("gpt2", sets=[f"decoder.placement={placement}", "dropout=0", "decoder.n_layers=1"])
    actual = explain(graph).nodes[1].steps
    assert list(actual[1 : 1 + len(steps)]) == steps
    assert (f"After the last layer: {'layernorm'}." in actual) == (placement != "post")


def test_what_a_plugin_says_of_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "halves.py").write_text(PLUGIN, encoding="utf-8")
    change = "decoder.ffn={kind: halves, d_half: 1200, slow: true}"
    text = text_of(capsys, "gpt2", "--plugin-dir", str(tmp_path), "--set", change)
    block = text[text.index("  ffn (halves)") : text.index("  norm (layernorm)")].splitlines()
    assert [line.strip() for line in block[1:-1]] == [
        "Two halves that never meet: each has its own layer.",
        "https://example.org/whole",
        "- d_half 1,200: Width of one half. https://example.org/half",
        "- slow: Whether it takes its time. https://example.org/slow",
    ]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(text_of(capsys, "gpt2", "--json"))
    assert data["parameters"] == 124439808
    assert [node["name"] for node in data["nodes"]] == ["embedding", "decoder", "logits"]
    assert data["nodes"][1]["parts"][0]["facts"][0] == "12 heads of width 64"


def test_papers() -> None:
    """By the labels in front of links, whatever the words between; a link without one is the module's own."""
    gpt2, llama = tfkit.load("gpt2"), tfkit.load("llama3_8b")
    norm, position = llama.node("decoder").config.norm, llama.node("decoder").config.attention.position  # type: ignore[attr-defined]
    assert papers_of(norm) == ("https://arxiv.org/abs/1910.07467",)
    assert papers_of(position) == ("https://arxiv.org/abs/2104.09864",)
    learned = gpt2.node("embedding").config.position  # type: ignore[attr-defined]
    assert papers_of(learned) == ("https://arxiv.org/abs/1705.03122",)
    assert field_papers(gpt2.node("decoder").config, "placement", "post") == ("https://arxiv.org/abs/1706.03762",)
    attention = llama.node("decoder").config.attention  # type: ignore[attr-defined]
    assert isinstance(attention, GroupedQueryConfig)
    assert papers_of(attention) == ("https://arxiv.org/abs/2305.13245",)
    assert papers_of(tfkit.load("gpt_oss_20b").node("decoder").config.ffn.activation) == ()  # type: ignore[attr-defined]


def test_a_class_is_explained_after_its_module_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = tfkit.load("llama3_8b").node("decoder").config.norm  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, type(norm).__module__)
    assert doc_of(norm) != ""
    assert papers_of(norm) == ()


def test_first_sentences() -> None:
    assert sentence("As in T5 v1.1. More of it.\n\nStill more.") == "As in T5 v1.1."
    assert sentence("Tables, https://a.b/c.\nMore.") == "Tables."
    assert sentence("Over\n    two lines.") == "Over two lines."
    assert sentence("weight * tanh(alpha x) + bias. More.") == "weight * tanh(alpha x) + bias."
    assert sentence("Queries times f(x). More `words`.") == "Queries times f(x)."
    assert sentence("A shift of `2`. More.") == "A shift of `2`."
    assert sentence("Chunks. (They differ.) More.") == "Chunks."
    assert doc_of(EmbeddingConfig).startswith("Token ids to vectors")


def test_every_built_in_component_says_what_it_is() -> None:
    from tfkit.plugin.manager import load_plugins

    registry = load_plugins().registry
    for slot in registry.slots():
        for component in registry.kinds(slot).values():
            assert issubclass(component.config, Component)
            assert doc_of(component.config), component

"""`show --prose`: it describes every component by its docstring."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tfkit
from tests.small_specs import SMALL_SPECS, covering
from tfkit.cli import main
from tfkit.component import Component, Config
from tfkit.components.attention import GroupedQueryConfig
from tfkit.components.embedding import EmbeddingConfig
from tfkit.tools.show.prose import doc_of, field_papers, first_sentence, papers_of, prose_of

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


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["show", *arguments, "--prose"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", some(["gpt2", "t5_small", "gemma3_1b", "deepseek_v3"], 2))
def test_text(capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None], name: str) -> None:
    golden(f"prose/{name}", text_of(capsys, name))


@pytest.mark.parametrize("name", covering(*SMALL_SPECS[::4]))
def test_every_component_is_described(capsys: pytest.CaptureFixture[str], name: str) -> None:
    graph = tfkit.load(name)
    values = prose_of(graph)
    kinds, texts = {value.value for value in values}, " ".join(value.text for value in values)
    papers = {paper for value in values for paper in value.papers}
    lines = text_of(capsys, name).splitlines()
    assert all(len(line) <= 80 for line in lines if "://" not in line)

    def check(config: Config) -> None:
        for _, content in config:
            for item in content.values() if isinstance(content, dict) else [content]:
                if isinstance(item, Component):
                    assert item.kind_name() in kinds, item
                    assert doc_of(item).rstrip(".") in texts, item
                    assert set(papers_of(item)) <= papers, item
                if isinstance(item, Config):
                    check(item)

    check(graph.spec.model)
    for node in graph.nodes:
        assert f"{node.name}: {node.config.kind_name()}" in lines
    assert graph.spec.model.source is None or f"Source: {graph.spec.model.source}" in lines
    assert (graph.spec.model.description or "") in " ".join(lines)


def test_a_text_appears_once() -> None:
    """A value that several components inherit is described where it is inherited first."""
    for name in ("gpt2", "vaswani_base"):
        values = prose_of(tfkit.load(name))
        texts = [(value.text, value.papers) for value in values if value.text]
        assert len(texts) == len(set(texts))
    norms = [value for value in values if value.name == "norm"]
    assert [bool(norm.text) for norm in norms] == [True, False]


def test_values_of_the_spec(capsys: pytest.CaptureFixture[str]) -> None:
    llama = text_of(capsys, "llama3_8b")
    assert "theta: 500000.0\n          Base of the geometric series of frequencies." in llama
    assert "d_ff: 14336\n        Width of the hidden layer." in llama
    assert "qk_norm" not in llama  # a default that is no component
    assert "pattern: [local*5, base]" in text_of(capsys, "gemma3_1b")


def test_prose_and_points(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gpt2", "--prose", "--points"]) == 2
    assert "--prose cannot be combined with --points" in capsys.readouterr().err


@pytest.mark.slow
def test_nothing_is_claimed_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The first sentences of docstrings say what a component can be; a model has one of them."""

    def texts_of(name: str, *sets: str) -> dict[str, str]:
        return {value.name: value.text for value in reversed(prose_of(tfkit.load(name, sets=sets))) if value.text}

    gpt2 = texts_of("gpt2")
    assert gpt2["embedding"] == "Token ids to vectors: the token table, plus positions."
    assert gpt2["logits"] == "Vectors to logits over the vocabulary: multiply by the output matrix."
    assert gpt2["decoder"] == "Layers with causal attention."
    llama = texts_of("llama3_8b")
    assert llama["embedding"] == "Token ids to vectors: the token table."
    bert = texts_of("bert_base")
    assert bert["embedding"].endswith(": the token table, plus positions, plus additional tables, normalized.")
    assert bert["logits"] == "Vectors to logits over the vocabulary: transform, multiply by the output matrix."
    pair = texts_of("vaswani_base")
    assert "causal attention, and cross-attention to `encoder`." in pair["decoder"]
    assert pair["source_embedding"] == "Token ids to vectors: the token table, scaled, plus positions."
    olmo = texts_of("olmo_1b")
    assert olmo["norm"] == "Subtract the mean, divide by the standard deviation."


def test_what_a_plugin_says_of_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "halves.py").write_text(PLUGIN, encoding="utf-8")
    change = "decoder.ffn={kind: halves, d_half: 1200, slow: true}"
    text = text_of(capsys, "gpt2", "--plugin-dir", str(tmp_path), "--set", change)
    block = text[text.index("  ffn: halves") : text.index("  n_layers: 12")].splitlines()
    assert [line.strip() for line in block] == [
        "ffn: halves",
        "Two halves that never meet: each has its own layer.",
        "https://example.org/whole",
        "d_half: 1200",
        "Width of one half.",
        "https://example.org/half",
        "slow: true",
        "Whether it takes its time.",
        "https://example.org/slow",
        *[line.strip() for line in block[9:]],
    ]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    values = {value["path"]: value for value in json.loads(text_of(capsys, "gpt2", "--json"))["values"]}
    assert values["graph.decoder.attention"] == {
        "path": "graph.decoder.attention",
        "value": "mha",
        "how": "given",
        "file": "specs/gpt2.yaml",
        "line": 19,
        "text": "Every head has its own keys and values.",
        "papers": ["https://arxiv.org/abs/1706.03762"],
    }
    assert "graph.decoder.attention.mask" not in values


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


def test_a_class_is_described_after_its_module_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = tfkit.load("llama3_8b").node("decoder").config.norm  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, type(norm).__module__)
    assert doc_of(norm) != ""
    assert papers_of(norm) == ()


def test_first_sentences() -> None:
    assert first_sentence("As in T5 v1.1. More of it.\n\nStill more.") == "As in T5 v1.1."
    assert first_sentence("Tables, https://a.b/c.\nMore.") == "Tables."
    assert first_sentence("Over\n    two lines.") == "Over two lines."
    assert first_sentence("weight * tanh(alpha x) + bias. More.") == "weight * tanh(alpha x) + bias."
    assert first_sentence("Queries times f(x). More `words`.") == "Queries times f(x)."
    assert first_sentence("A shift of `2`. More.") == "A shift of `2`."
    assert first_sentence("Chunks. (They differ.) More.") == "Chunks."
    assert doc_of(EmbeddingConfig).startswith("Token ids to vectors")


def test_every_built_in_component_says_what_it_is() -> None:
    from tfkit.plugin.manager import load_plugins

    registry = load_plugins().registry
    for slot in registry.slots():
        for component in registry.kinds(slot).values():
            assert issubclass(component.config, Component)
            assert doc_of(component.config), component

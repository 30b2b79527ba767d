"""Weight maps are compared with the class of their family, also if no config.json can state a reduced model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import tfkit
from tfkit.errors import SpecError
from tfkit.graph.expand import Graph
from tfkit.tools.check.measure import Outcome, outcome_of
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.properties import forms
from tfkit.tools.check.properties.forms import in_transformers
from tfkit.tools.check.reduced import reduced_model
from tfkit.tools.import_.importing import export_config, family_models

PLUGINS = tfkit.load_plugins()
DERIVED = """
afm_4_5b clip_base_32 dbrx deepseek_v2 dinov2_base esmc_300m eurobert_610m falcon_180b falcon_40b falcon_h1_0_5b
gemma3n_e2b gemma4_e2b llama32_3b mamba2_130m minicpm3_4b ministral3_3b mistral4 mpnet_base opus_mt_en_de
recurrentgemma_2b siglip_base_16 siglip_vision_base_16 t5_small whisper_tiny
""".split()  # noqa: SIM905
"""Specs whose family derives a value, or whose class checks more than its config declares."""


EXCHANGED = {"decoder.layers.{i}.cross_attention.project.[q k v]": ".decoder.block.{i}.layer.1.EncDecAttention.[q v k]"}


def outcome(graph: Graph) -> Outcome:
    """The result of `transformers` for the reduced model."""
    return outcome_of(in_transformers, ModelUnderTest(reduced_model(graph, PLUGINS).graph, PLUGINS))


def with_map(folder: Path, spec: str, family: str, tensors: object) -> Graph:
    """A spec with its own entries in the map of its family."""
    data = {"tfkit": 1, "extends": spec, "name": "mine", "checkpoint": {"extends": family, "tensors": tensors}}
    (folder / "mine.yaml").write_text(json.dumps(data))
    return tfkit.load(folder / "mine.yaml", plugins=PLUGINS)


def test_the_family_derives_values() -> None:
    """The scale of T5's logits is the root of the width."""
    small = reduced_model(tfkit.load("t5_small", plugins=PLUGINS), PLUGINS).graph
    (derived,) = family_models(small, PLUGINS)
    scales = [graph.spec.model.graph["logits"].model_dump()["scale"] for graph in (small, derived)]
    assert scales == pytest.approx([512**-0.5, 32**-0.5])
    assert derived.spec.model.graph["decoder"] == small.spec.model.graph["decoder"]


def test_the_first_model_has_the_reduced_values() -> None:
    small = reduced_model(tfkit.load("gpt2", plugins=PLUGINS), PLUGINS).graph
    assert next(family_models(small, PLUGINS)) is small


def test_values_that_no_family_derives_differ() -> None:
    small = reduced_model(tfkit.load("gpt3_175b", plugins=PLUGINS), PLUGINS).graph
    with pytest.raises(SpecError, match="of gpt2 cannot describe this model"):
        list(family_models(small, PLUGINS))


def test_a_derived_model_has_the_map_of_its_spec(tmp_path: Path) -> None:
    """Not the map of the first spec of its model type."""
    small = reduced_model(with_map(tmp_path, "t5_small", "t5", EXCHANGED), PLUGINS).graph
    (derived,) = family_models(small, PLUGINS)
    assert derived.spec.family == small.spec.family


def test_the_first_of_two_equal_values_counts() -> None:
    """Reducing keeps one of two widths of SigLIP that one field of its config.json states."""
    small = reduced_model(tfkit.load("siglip_vision_base_16", plugins=PLUGINS), PLUGINS).graph
    (derived,) = family_models(small, PLUGINS)
    nodes = [
        graph.spec.model.graph[name] for graph, name in ((small, "encoder"), (derived, "encoder"), (derived, "pooled"))
    ]
    assert len({dict(dict(node)["ffn"])["d_ff"] for node in nodes}) == 1


@pytest.mark.parametrize("name", ["falcon_40b", "falcon_180b"])
def test_a_spec_with_two_norms_has_their_names(name: str) -> None:
    small = reduced_model(tfkit.load(name, plugins=PLUGINS), PLUGINS).graph
    assert export_config(small, PLUGINS)["num_ln_in_parallel_attn"] == 2


def test_a_width_stays_a_multiple_of_its_heads() -> None:
    """A class of transformers may require it, although heads have their own width."""
    config = dict(reduced_model(tfkit.load("llama32_3b", plugins=PLUGINS), PLUGINS).graph.spec.model.graph["decoder"])
    assert config["d_model"] % config["attention"].n_heads == 0
    assert config["attention"].n_heads == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", DERIVED)
def test_the_map_is_compared(name: str) -> None:
    assert outcome(tfkit.load(name, plugins=PLUGINS)).status == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "family", "tensors", "text"),
    [
        (
            "falcon_h1_0_5b",
            "falcon_h1",
            {
                "decoder.layers.{i}.mixer.[gate x b c step]": {
                    ".layers.{i}.mamba.in_proj": "[gate x b c step] ... -> gate ..., x ..., c ..., b ..., step ..."
                }
            },
            "the outputs of transformers differ by",
        ),
        (
            "recurrentgemma_2b",
            "recurrent_gemma",
            {"decoder.layers.{i}.ffn.[gate up]": ".layers.{i}.mlp_block.[up gate]_proj"},
            "the outputs of transformers differ by",
        ),
        (
            "t5_small",
            "t5",
            EXCHANGED,
            "the outputs of transformers differ by",
        ),
        (
            "flan_t5_small",
            "t5",
            {"encoder.layers.{i}.ffn.[gate up down]": ".encoder.block.{i}.layer.1.DenseReluDense.[wi_0 wo wi_1]"},
            "encoder.block.0.layer.1.DenseReluDense.wi_1.weight: [32, 64]; expected [64, 32]",
        ),
    ],
)
def test_exchanged_parts(spec: str, family: str, tensors: object, text: str, tmp_path: Path) -> None:
    result = outcome(with_map(tmp_path, spec, family, tensors))
    assert result.status == "failed"
    assert text in result.detail


def test_the_deviation_from_transformers_is_that_of_the_last_output(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [SimpleNamespace(relative=relative) for relative in (0.5, 0.125, 0.25)]
    comparison = SimpleNamespace(difference=1.0, parts=parts, first=SimpleNamespace(name="decoder.layers.0.ffn"))
    monkeypatch.setattr(forms, "_comparison_with_class", lambda *_: comparison)
    actual = outcome(tfkit.load("gpt2", plugins=PLUGINS))
    assert (actual.status, actual.worst, actual.component) == ("failed", 0.25, "decoder.layers.0.ffn")

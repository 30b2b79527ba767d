"""Parameter counts of every spec equal the count of a published model or of a formula.

Most are held against a published config.json, in families/test_gallery.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tfkit
from tfkit.spec.load import read_tree
from tfkit.spec.source import plain_data

from ..known import KNOWN, NAMES
from ..sampling import some

PUBLISHED = Path(__file__).parents[1] / "published"

# Those without a config.json in tests/published: class and config, what it leaves out is its class's default.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # The band of every other layer hides keys and has no parameters.
    "gpt3_175b": (
        "GPT2LMHeadModel",
        {"n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048},
    ),
    "llama3_405b": (
        "LlamaForCausalLM",
        {"vocab_size": 128256, "rms_norm_eps": 1e-5, "hidden_size": 16384, "intermediate_size": 53248}
        | {"num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8},
    ),
}


def encoder_decoder(d: int, d_ff: int, vocab: int, n: int) -> int:
    """Attention is all you need: projections without biases, an FFN with them, one table in three places."""
    attention, ffn, norm = 4 * d * d, d * d_ff + d_ff + d_ff * d + d, 2 * d
    encoder = attention + ffn + 2 * norm
    decoder = 2 * attention + ffn + 3 * norm
    return vocab * d + n * (encoder + decoder)


def character_model(d: int, ffn: int, n: int, length: int, vocab: int = 65) -> int:
    """nanoGPT without biases: two tables, layers with two norms of weights alone, a final norm."""
    return vocab * d + length * d + n * (4 * d * d + ffn + 2 * d) + d


def palm(d: int, n_heads: int, d_head: int, n: int, vocab: int) -> int:
    """PaLM, table 1: one norm per layer, one key-value head, SwiGLU of width 4 d, tied logits."""
    attention = 2 * d * n_heads * d_head + 2 * d * d_head
    return vocab * d + n * (d + attention + 3 * d * 4 * d) + d


def streams(norm: int, sublayer: int, leave: int) -> int:
    """A tied decoder with SwiGLU; parameters of a norm, of a sublayer's residual, and of the last read."""
    d, ffn, n, vocab = 768, 2048, 12, 50257
    return vocab * d + n * (4 * d * d + 3 * d * ffn + 2 * (norm + sublayer)) + norm + leave


def diffusion(d: int, n: int, patch: int, time: int, outputs: int) -> int:
    """DiT: shift, scale and gate of each sublayer, and a last shift and scale, are linear in the condition."""
    layer = 4 * d * d + 4 * d + 8 * d * d + 5 * d + 6 * (d * d + d)
    inputs = patch * d + d + time * d + d + d * d + d
    return inputs + n * layer + 2 * (d * d + d) + d * outputs + outputs


FORMULAS: dict[str, int] = {
    "mhc_small": streams(768, 24 * 4 * 768 + 24 + 3, 4 * 4 * 768 + 4 + 1),
    "gated_streams_small": streams(0, 4 * 768 * (1 + 2 * 64 + 4), 4 * 768 * (1 + 2 * 64)),
    "depth_small": streams(768, 768, 0),
    "dit_small": diffusion(384, 12, 16, 256, 32),
    "value_residual_small": streams(768, 0, 11 * 2),
    "vaswani_base": encoder_decoder(512, 2048, 37000, 6),
    "vaswani_big": encoder_decoder(1024, 4096, 37000, 6),
    "nanogpt": character_model(192, 2 * 192 * 768, 6, 256),
    "char_relu": character_model(96, 2 * 96 * 384, 8, 128),
    "char_swiglu": character_model(96, 3 * 96 * 256, 8, 128),
    "palm_540b": palm(18432, 48, 256, 118, 256000),
    # BERT without segments: tables with their norm and 12 layers, once
    "sentence_bert_base": (30522 + 512 + 2) * 768 + 12 * (12 * 768**2 + 13 * 768),
    "block_512": 1_048_576 + 2_097_152 + 2_048,
}

FIGURES = {
    "gpt2": 124_439_808,
    "gpt2_xl": 1_557_611_200,
    "llama2_70b": 68_976_648_192,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mistral_7b": 7_241_732_096,
}


def published(name: str) -> nn.Module:
    """The Hugging Face model of the spec, on the meta device."""
    class_name, values = MODELS[name]
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        return model_class(model_class.config_class(**values))


def count(model: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def of_kind(model: Any, prefix: str, slot: str) -> int:
    """Parameters of all submodules below `prefix` that fill `slot`."""
    filled = ((path, value.slot) for path, value in model.meta["components"].items() if path.startswith(prefix))
    return sum(count(model.get_submodule(path)) for path, where in filled if where == slot)


def test_every_spec_has_a_reference() -> None:
    published = {path.stem for path in PUBLISHED.glob("*.json")}
    assert [name for name in NAMES if name not in {*MODELS, *FORMULAS, *published}] == []
    assert published.isdisjoint({*MODELS, *FORMULAS})


@pytest.mark.parametrize("name", some(MODELS, 1))
def test_equals_hugging_face(name: str) -> None:
    assert count(tfkit.build(name, device="meta")) == count(published(name))


@pytest.mark.parametrize("name", some(FORMULAS, 5))
def test_equals_formula(name: str) -> None:
    assert count(tfkit.build(name, device="meta")) == FORMULAS[name]


@pytest.mark.parametrize("name", some(FIGURES, 3))
def test_equals_published_figure(name: str) -> None:
    assert count(tfkit.build(name, device="meta")) == FIGURES[name]


def test_block_512_by_component() -> None:
    model = tfkit.build("block_512", device="meta")
    parts = {slot: of_kind(model, "encoder.", slot) for slot in ("attention", "ffn", "norm")}
    assert parts == {"attention": 1_048_576, "ffn": 2_097_152, "norm": 2_048}


def test_character_models_are_of_one_size() -> None:
    assert FORMULAS["char_relu"] == FORMULAS["char_swiglu"]


@pytest.mark.parametrize("name", some(MODELS, 1))
def test_norms_have_the_published_epsilon(name: str) -> None:
    """Logits at small sizes do not tell 1e-5 from 1e-12."""

    def epsilons(model: nn.Module) -> set[float]:
        actual = (getattr(m, "eps", getattr(m, "variance_epsilon", None)) for m in model.modules())
        return {eps for eps in actual if eps is not None}

    assert epsilons(tfkit.build(name, device="meta")) == epsilons(published(name))


@pytest.mark.slow
def test_what_every_file_says() -> None:
    for name in NAMES:
        lines = KNOWN.files[name].path.read_text(encoding="utf-8").splitlines()
        assert max(map(len, lines)) <= 120, name
        tree = plain_data(read_tree(name, KNOWN))
        assert tree["name"] == name
        assert tree["source"].startswith("https://"), name
        assert len(tree["description"]) <= 80, name


def test_no_file_is_overlooked() -> None:
    """Neither a spec in a subfolder nor one with another suffix escapes the tests above."""
    folders = {file.path.parent for file in KNOWN.files.values()}
    files = [path for folder in folders for path in folder.rglob("*.y*ml")]
    actual = {path for path in files if path.parent.name not in ("runs", "sweeps", "families", "heads")}
    assert actual == {file.path for file in KNOWN.files.values()}

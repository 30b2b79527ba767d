"""Rotary frequencies and rotations, compared with the code of published models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense as hunyuan
from transformers.models.nanochat import modeling_nanochat as nanochat
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.phimoe import modeling_phimoe as phimoe
from transformers.models.roformer import modeling_roformer as roformer

import tfkit
from tfkit.components.rope import RotaryTable
from tfkit.testing import check_cached, check_cached_step, check_capture, check_script, example_inputs

SHORT_FACTOR = [1.0, 1.05, 1.3, 1.9]
LONG_FACTOR = [1.0, 2.5, 7.0, 31.0]
LONGROPE = f"{{kind: longrope, short_factor: {SHORT_FACTOR}, long_factor: {LONG_FACTOR}, original_max_len: 8, "


def build(position: str, d_head: int = 8) -> Any:
    """A small decoder with that position in its attention."""
    text = f"""
        tfkit: 1
        name: test
        d_model: 16
        vocab_size: 61
        max_len: 64
        graph:
          embedding: {{block: embedding}}
          decoder: {{block: decoder, n_layers: 2, attention: {{kind: mha, n_heads: 2, d_head: {d_head}}}}}
          logits: {{block: lm_head}}
    """
    return tfkit.loads(text, sets=[f"graph.decoder.attention.position={position}"])


def table_of(position: str, d_head: int = 8) -> RotaryTable:
    rotary = tfkit.build(build(position, d_head)).decoder.shared["base"].rotary
    assert isinstance(rotary, RotaryTable)
    return rotary


def rope_config(cls: type[Any], rope: dict[str, Any], max_len: int = 256, **sizes: Any) -> Any:
    options = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    parameters = {"rope_theta": 10000.0, **rope}
    return cls(**{**options, **sizes}, max_position_embeddings=max_len, rope_parameters=parameters)


def agree(rotary: RotaryTable, frequencies: Tensor, factor: float, n_keys: int = 5) -> None:
    """Frequencies and temperature are those of another implementation."""
    torch.testing.assert_close(rotary.frequencies(n_keys, torch.device("cpu")), frequencies, rtol=1e-6, atol=0)
    assert rotary.cos_factor == pytest.approx(factor)
    assert rotary.sin_factor == rotary.cos_factor


YARN: dict[str, tuple[str, dict[str, Any]]] = {
    "as in the paper": ("factor: 4, original_max_len: 64", {"factor": 4.0}),
    "betas": (
        "factor: 4, original_max_len: 64, beta_fast: 16, beta_slow: 2",
        {"factor": 4.0, "beta_fast": 16, "beta_slow": 2},
    ),
    "one border": (
        "factor: 32, original_max_len: 64, beta_fast: 1, beta_slow: 1",
        {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
    ),
    "one border within a pair": (
        "factor: 32, original_max_len: 64, beta_fast: 1, beta_slow: 1, truncate: false",
        {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    ),
    "whole length": ("factor: 4, original_max_len: 64", {"factor": None}),
    "temperature": ("factor: 8, original_max_len: 64, temperature: 1.2", {"factor": 8.0, "attention_factor": 1.2}),
    "exact borders": (
        "factor: 32, original_max_len: 64, truncate: false, beta_fast: 6",
        {"factor": 32.0, "truncate": False, "beta_fast": 6.0},
    ),
    "both scales": (
        "factor: 40, original_max_len: 64, mscale: 0.707, mscale_all_dim: 1.5",
        {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.5},
    ),
    "equal scales": (
        "factor: 40, original_max_len: 64, mscale: 1, mscale_all_dim: 1",
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "no stretch": ("factor: 1, original_max_len: 64", {"factor": 1.0}),
    "a training that is shorter than a turn": ("factor: 4, original_max_len: 4", {"factor": 4.0, "original": 4}),
}


@pytest.mark.parametrize("case", YARN)
@pytest.mark.parametrize("width", [8, 32])
def test_yarn(case: str, width: int) -> None:
    ours, theirs = YARN[case]
    theirs = {"rope_type": "yarn", "original_max_position_embeddings": theirs.get("original", 64), **theirs}
    theirs.pop("original", None)
    # A config object refuses a factor of null, which some published files have: it is put in afterwards.
    config = rope_config(transformers.LlamaConfig, {**theirs, "factor": theirs["factor"] or 1.0}, head_dim=width)
    config.rope_parameters["factor"] = theirs["factor"]
    rotary = table_of(f"{{kind: rope, scaling: {{kind: yarn, {ours}}}}}", d_head=width)
    agree(rotary, *ROPE_INIT_FUNCTIONS["yarn"](config))


@pytest.mark.parametrize("length", [5, 8, 9, 20])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("factor: 16", {"rope_type": "longrope"}),
        ("temperature: 1.7", {"rope_type": "longrope", "attention_factor": 1.7}),
        ("factor: 3", {"rope_type": "longrope", "factor": 3.0}),
        ("factor: 0.5", {"rope_type": "longrope", "factor": 0.5}),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_longrope(length: int, ours: str, theirs: dict[str, Any]) -> None:
    options = {
        **theirs,
        "short_factor": SHORT_FACTOR,
        "long_factor": LONG_FACTOR,
        "original_max_position_embeddings": 8,
    }
    config = rope_config(transformers.LlamaConfig, options, max_len=128)
    rotary = table_of(f"{{kind: rope, scaling: {LONGROPE}{ours}}}}}")
    agree(rotary, *ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length), n_keys=length)


@pytest.mark.parametrize("length", [5, 9])
def test_longrope_is_that_of_phi3(length: int) -> None:
    """The whole table, of all pairs of heads of which a part is turned."""
    rope = {
        "rope_type": "longrope",
        "short_factor": SHORT_FACTOR,
        "long_factor": LONG_FACTOR,
        "partial_rotary_factor": 0.5,
    }
    rope["original_max_position_embeddings"] = 8
    config = rope_config(transformers.Phi3Config, rope, hidden_size=32, original_max_position_embeddings=8)
    x, positions = torch.zeros(1, length, 32), torch.arange(length)[None]
    cos, sin = phi3.Phi3RotaryEmbedding(config)(x, positions)
    rotary = table_of(f"{{kind: rope, width: 8, scaling: {LONGROPE}factor: 32}}}}", d_head=16)
    table = rotary(positions, length)[:, 0, 0]
    signs = torch.tensor([-1.0] * 4 + [1.0] * 4)
    torch.testing.assert_close(table, torch.stack((cos[0], sin[0] * signs)))


def test_longrope_is_that_of_phimoe_where_its_two_temperatures_are_equal() -> None:
    rope = {"rope_type": "longrope", "short_factor": SHORT_FACTOR, "long_factor": LONG_FACTOR}
    rope |= {"short_mscale": 1.24, "long_mscale": 1.24, "original_max_position_embeddings": 8}
    positions = torch.arange(8)[None]
    cos, _ = phimoe.PhimoeRotaryEmbedding(rope_config(transformers.PhimoeConfig, rope))(torch.zeros(1), positions)
    rotary = table_of(f"{{kind: rope, scaling: {LONGROPE}temperature: 1.24}}}}")
    torch.testing.assert_close(rotary(positions, 8)[0, 0, 0], cos[0])


@pytest.mark.parametrize("original_max_len", [4, 12])
def test_longrope_reads_in_pieces(original_max_len: int) -> None:
    """Sequences in caches for 12 tokens are as long as these, however much of them was read."""
    scaling = LONGROPE.replace("original_max_len: 8", f"original_max_len: {original_max_len}")
    graph = build(f"{{kind: rope, scaling: {scaling}factor: 16}}}}")
    check_cached(tfkit.build(graph), example_inputs(graph, length=12))


@pytest.mark.slow
def test_one_capture_of_longrope_serves_short_and_long_sequences() -> None:
    graph = build(f"{{kind: rope, scaling: {LONGROPE}factor: 16}}}}")
    model = tfkit.build(graph)
    calls = [example_inputs(graph, length=length, padding="left") for length in (5, 8, 11)]
    check_capture(model, *calls)
    check_script(model, *calls)
    check_cached_step(model, example_inputs(graph, length=12))


def test_ntk_is_that_of_hunyuan() -> None:
    rope = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
    config = rope_config(transformers.HunYuanDenseV1Config, rope, head_dim=8)
    theirs = hunyuan.HunYuanDenseV1RotaryEmbedding(config)
    agree(table_of("{kind: rope, scaling: {kind: ntk, factor: 50}}"), theirs.inv_freq, theirs.attention_scaling)


def test_ntk_stretches_the_slowest_pair_by_its_factor_and_leaves_the_first() -> None:
    plain, scaled = (
        table_of(f"{{kind: rope{scaling}}}").frequencies(5, torch.device("cpu"))
        for scaling in ("", ", scaling: {kind: ntk, factor: 50}")
    )
    torch.testing.assert_close(plain[-1] / scaled[-1], torch.tensor(50.0))
    assert plain[0] == scaled[0] == 1


def test_proportional_is_that_of_gemma4() -> None:
    rope = {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25}
    plain = {"rope_theta": 1e4, "rope_type": "default"}
    config = transformers.Gemma4TextConfig(
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        head_dim=16,
        global_head_dim=32,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"full_attention": rope, "sliding_attention": plain},
    )
    theirs = modeling_gemma4.Gemma4TextRotaryEmbedding(config).full_attention_inv_freq
    assert theirs.shape == (16,)
    rotary = table_of("{kind: rope, theta: 1e6, scaling: {kind: proportional, width: 8}}", d_head=32)
    agree(rotary, theirs, 1.0)


def rotated(position: str, x: Tensor) -> Tensor:
    """x [b, h, t, d] as the attention of a model turns its queries."""
    model = tfkit.build(build(position, x.size(-1)))
    table = table_of(position, x.size(-1))(torch.arange(x.size(2))[None], x.size(2))
    return model.decoder.layers[0].attention.rotate(x, table)


def test_reverse_is_the_rotation_of_nanochat() -> None:
    q = torch.randn(2, 2, 7, 16)
    config = rope_config(transformers.NanoChatConfig, {"rope_type": "default"}, hidden_size=32)
    cos, sin = nanochat.NanoChatRotaryEmbedding(config)(q, torch.arange(7)[None])
    expected, _ = nanochat.apply_rotary_pos_emb(q, q, cos, sin)
    torch.testing.assert_close(rotated("{kind: rope, reverse: true}", q), expected)
    assert not torch.allclose(rotated("rope", q), expected, atol=0.1)


def test_interleaved_is_the_rotation_of_roformer() -> None:
    q = torch.randn(2, 2, 7, 16)
    sinusoidal = roformer.RoFormerSinusoidalPositionalEmbedding(32, 16)
    sinusoidal.weight = nn.Parameter(sinusoidal.create_weight(), requires_grad=False)
    angles = sinusoidal(torch.Size([2, 7]))[None, None]
    expected, _ = roformer.RoFormerSelfAttention.apply_rotary_position_embeddings(angles, q, q)
    torch.testing.assert_close(rotated("{kind: rope, style: interleaved}", q), expected)

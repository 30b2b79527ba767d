"""Differential attention: guarantees, the formula of the reference, its factor in each layer, and invalid fields."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tfkit_mla.differential import DifferentialConfig
from torch import nn

import tfkit
from tfkit.cli import main
from tfkit.testing import Layout, check_component, check_model

PLUGINS = tfkit.load_plugins(plugin_dirs=[Path(__file__).parents[1]], entry_points=False)
FIELDS = {"n_heads": 8, "n_kv_heads": 4, "d_head": 4}


@pytest.mark.slow
@pytest.mark.parametrize("within", ["decoder", "encoder", "memory"])
def test_it_has_every_property(within: Layout) -> None:
    rope = {} if within == "memory" else {"position": "rope"}
    check_component(DifferentialConfig, fields={**FIELDS, "softcap": 2.0, **rope}, within=[within])


def spec_of(n_layers: int = 2, **fields: Any) -> str:
    stack = {"block": "decoder", "n_layers": n_layers, "attention": {"kind": "differential", **FIELDS, **fields}}
    graph = {"embedding": {"block": "embedding"}, "decoder": stack, "logits": {"block": "lm_head"}}
    spec = {"tfkit": 1, "name": "m", "d_model": 16, "vocab_size": 11, "max_len": 12, "graph": graph}
    return yaml.safe_dump(spec, sort_keys=False)


def graph_of(n_layers: int = 2, **fields: Any) -> tfkit.Graph:
    return tfkit.loads(spec_of(n_layers, **fields), plugins=PLUGINS)


def test_it_trains_is_scripted_and_decodes_with_a_cache() -> None:
    graph = graph_of(position="rope", mask={"left": 2, "right": 0})
    check_model(graph, plugins=PLUGINS, only=["weights", "padded-gradients", "look-ahead", "script", "cached"])


@pytest.mark.parametrize(
    "fields",
    [
        {"position": "rope", "mask": {"left": 2, "right": 0}, "qk_norm": "rmsnorm"},
        {
            "n_kv_heads": 2,
            "position": "alibi",
            "softcap": 2.0,
            "scale": 0.7,
            "head_norm": "layernorm",
            "lambda_init": 0.3,
        },
    ],
)
def test_it_computes_what_the_reference_says(
    fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.yaml").write_text(spec_of(**fields))
    assert main(["check", str(tmp_path / "m.yaml"), "--only", "meaning"]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 ok")  # not: does not apply


@pytest.mark.parametrize("value", [None, 0.25])
def test_the_factor_begins_with_a_constant_of_the_layer(value: float | None) -> None:
    model = tfkit.build(graph_of(3, lambda_init=value))
    for layer in range(3):
        core = model.get_submodule(f"decoder.layers.{layer}.attention.core")
        for parameter in core.parameters(recurse=False):
            assert 0.0 < parameter.abs().max() < 0.6
            nn.init.zeros_(parameter)
        expected = 0.8 - 0.6 * math.exp(-0.3 * layer) if value is None else value
        torch.testing.assert_close(core.factor(), torch.tensor(expected))  # type: ignore[operator]


def test_heads_of_both_halves_are_pairs() -> None:
    """A reduced model of `tfkit check` has a single pair of key-value heads; this one has two."""
    core = tfkit.build(graph_of(1, head_norm={"kind": "rmsnorm", "scale": False})).get_submodule(
        "decoder.layers.0.attention.core"
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 5, 4, generator=generator) for heads in (8, 4, 4))
    pairs = []
    for pair in range(4):
        weights = [
            torch.softmax(q[0, head] @ k[0, keys].T / 2, dim=1)
            for head, keys in ((pair, pair // 2), (pair + 4, pair // 2 + 2))
        ]
        values = torch.cat((v[0, pair // 2], v[0, pair // 2 + 2]), dim=1)
        difference = (weights[0] - core.factor() * weights[1]) @ values  # type: ignore[operator]
        pairs.append(0.8 * nn.functional.rms_norm(difference, (8,), eps=1e-6))
    merged = core(q, k, v, None)[0].transpose(0, 1).flatten(1)
    torch.testing.assert_close(merged, torch.cat(pairs, dim=1), rtol=1e-5, atol=1e-5)


def test_the_weights_of_both_heads_can_be_seen() -> None:
    model = tfkit.build(graph_of(1)).eval()
    tokens = torch.arange(5)[None]
    weights = tfkit.attention_weights(model, tokens)["decoder.layers.0.attention"]
    assert weights.shape == (1, 8, 5, 5)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(1, 8, 5))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n_kv_heads": 1}, "n_kv_heads must be even, because key-value heads form pairs; got 1"),
        ({"n_kv_heads": 6}, r"n_heads \(8\) must be a multiple of n_kv_heads \(6\)"),
        ({"sinks": True}, "`sinks` cannot be used"),
        ({"lambda_init": 1.0}, "lambda_init"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(tfkit.SpecError, match=reason):
        graph_of(**fields)

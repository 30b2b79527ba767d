"""The kinds: formulas by other libraries, guarantees in encoders, and what decoders and specs reject."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tfkit_encoders import FourierConfig, GroupedMLPConfig, MixedConvConfig
from torch import nn

import tfkit
from tfkit.testing import check_component, check_model

PLUGINS = tfkit.load_plugins(plugin_dirs=[Path(__file__).parents[1]], entry_points=False)
MIXED: dict[str, Any] = {"attention": {"kind": "mixed_conv", "n_heads": 2, "conv_size": 5}}
FOURIER: dict[str, Any] = {"attention": None, "mixer": "fourier"}


def graph_of(layer: dict[str, Any], block: str = "encoder") -> tfkit.Graph:
    stack = {"block": block, "n_layers": 2, "ffn": {"kind": "gelu", "d_ff": 24}, **layer}
    embedding = {"block": "embedding", "position": "learned"}
    graph = {"embedding": embedding, "stack": stack, "logits": {"block": "lm_head"}}
    spec = {"tfkit": 1, "name": "m", "d_model": 16, "vocab_size": 23, "max_len": 40, "graph": graph}
    return tfkit.loads(yaml.safe_dump(spec, sort_keys=False), plugins=PLUGINS)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.1)])
def test_each_document_has_its_transform(dtype: torch.dtype, tolerance: float) -> None:
    """NumPy transforms the tokens of each document; padding and all other documents have no effect."""
    mixer = tfkit.component("mixer", kind="fourier", d_model=6, plugins=PLUGINS)
    x = torch.randn(1, 9, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    values = x[0].double().numpy()
    documents = torch.tensor([[1, 0, 1, 1, 2, 0, 2, 2, 2]])  # 0 is padding
    same = (documents[:, :, None] == documents[:, None, :]) & (documents > 0)[:, None, :]
    y = mixer(x, mask=same)
    assert y.dtype == dtype
    for number in (1, 2):
        tokens = documents[0] == number
        expected = np.fft.fft2(values[tokens.numpy()]).real
        torch.testing.assert_close(y[0, tokens].double(), torch.tensor(expected), rtol=0.01, atol=tolerance)
    expected = np.fft.fft2(values).real
    torch.testing.assert_close(mixer(x)[0].double(), torch.tensor(expected), rtol=0.01, atol=tolerance)


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_groups_are_those_of_a_convolution(bias: bool) -> None:
    fields = {"kind": "grouped_mlp", "d_model": 12, "d_ff": 24, "groups": 3, "activation": "relu", "bias": bias}
    ffn = tfkit.component("ffn", **fields, plugins=PLUGINS)
    convs = {
        "up": nn.Conv1d(12, 24, 1, groups=3, bias=bias),
        "down": nn.Conv1d(24, 12, 1, groups=3, bias=bias),
    }
    for path, parameter in ffn.named_parameters():
        *_, layer, name = path.split(".")
        theirs = convs[layer.removeprefix("grouped_")].get_parameter(name)
        parameter.copy_(theirs.view_as(parameter))
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    expected = convs["down"](torch.relu(convs["up"](x.mT))).mT
    torch.testing.assert_close(ffn(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_every_kind_has_every_property() -> None:
    check_component(FourierConfig, within=["encoder"], level="full")
    fields = {"n_heads": 2, "conv_size": 3, "position": "rope", "mask": {"left": 2}}
    check_component(MixedConvConfig, fields=fields, within=["encoder"], level="full")
    check_component(GroupedMLPConfig, fields={"groups": 2}, within=["encoder"])


def test_a_kind_without_options_is_checked_in_encoders() -> None:
    """Decoders, which reject it, are left out of the small models."""
    check_component(FourierConfig, plugins=PLUGINS, only=["padding"])


@pytest.mark.parametrize("fields", [{"position": "rope", "bias": False}, {"position": "alibi", "mask": {"left": 2}}])
def test_positions_and_masks_apply_to_the_heads_of_attention(fields: dict[str, Any]) -> None:
    graph = graph_of({"attention": {**MIXED["attention"], **fields}})
    check_model(graph, plugins=PLUGINS, only=["meaning", "backends"])


@pytest.mark.parametrize("layer", [FOURIER, MIXED], ids=["fourier", "mixed_conv"])
def test_a_row_is_the_row_alone(layer: dict[str, Any]) -> None:
    check_model(graph_of(layer), plugins=PLUGINS, only=["meaning", "padding", "documents", "fully-masked", "script"])


@pytest.mark.parametrize(("layer", "role"), [(FOURIER, "mixer"), (MIXED, "attention")], ids=["fourier", "mixed_conv"])
def test_what_needs_a_causal_model_rejects_the_kind(layer: dict[str, Any], role: str) -> None:
    kind = {"mixer": "fourier", "attention": "mixed_conv"}[role]
    with pytest.raises(tfkit.SpecError, match=f"a decoder's {role} must not depend on later positions; got `{kind}`"):
        graph_of(layer, "decoder")
    causal = {} if role == "mixer" else {"attention": {**layer["attention"], "mask": {"right": 2}}}
    model = tfkit.build(graph_of(layer | causal)).eval()
    with pytest.raises(tfkit.SpecError, match=r"needs the full sequence|does not cache its tokens"):
        tfkit.CachedModel(model, length=8)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"conv_size": 4}, "conv_size must be odd, because the query is in the middle; got 4"),
        ({"n_heads": 16}, r"d_model \(16\) must be a multiple of 2 \* n_heads \(32\)"),
        ({"mask": {"right": 0}}, r"`right` must be at least conv_size // 2 \(2\), as the convolution covers; got 0"),
        ({"mask": {"rule": {"kind": "chunk", "size": 4}}}, "a mask rule could hide tokens"),
    ],
)
def test_invalid_fields_of_mixed_conv(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(tfkit.SpecError, match=reason):
        graph_of({"attention": {**MIXED["attention"], **fields}})


def test_groups_divide_both_widths() -> None:
    ffn = {"kind": "grouped_mlp", "d_ff": 24, "groups": 3, "activation": "gelu"}
    with pytest.raises(tfkit.SpecError, match=r"d_model \(16\) must be a multiple of groups \(3\)"):
        graph_of({"ffn": ffn})
    with pytest.raises(tfkit.SpecError, match=r"d_ff \(24\) must be a multiple of groups \(16\)"):
        graph_of({"ffn": {**ffn, "groups": 16}})


def test_attention_weights_are_those_of_the_heads_of_attention() -> None:
    model = tfkit.build(graph_of(MIXED)).eval()
    weights = tfkit.attention_weights(model, torch.arange(7)[None])["stack.layers.0.attention"]
    assert weights.shape == (1, 2, 7, 7)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(1, 2, 7))

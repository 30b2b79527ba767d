"""Twelve specs, each at two sizes: the changes at the base sizes, and the sizes that grow. All ratios differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tfkit
from tfkit.graph.expand import Graph, expand
from tfkit.run.kinds.parametrizations import MuPConfig
from tfkit.run.parametrization import with_factors

DECODER = {"decoder.n_layers": 2, "vocab_size": 96}


@dataclass(frozen=True)
class ScaledSpec:
    """A spec, the changes that make it small, and the base sizes and sizes of its widths."""

    spec: str | Mapping[str, Any]
    small: Mapping[str, Any]
    widths: Mapping[str, tuple[int, int]]

    def sets(self, index: int) -> dict[str, Any]:
        """Return the changes at the base sizes, 0, or at the sizes, 1."""
        return {"parameters": None, **self.small, **{path: pair[index] for path, pair in self.widths.items()}}

    def graphs(self, kind: type[MuPConfig] = MuPConfig) -> tuple[MuPConfig, Graph, Graph]:
        """Return the parametrization, the graph at the base sizes, and the graph with factors."""
        base, spec = (tfkit.load(self.spec, sets=self.sets(index)).spec for index in (0, 1))
        config = kind(base={f"model.{path}": pair[0] for path, pair in self.widths.items()})
        return config, expand(base), expand(with_factors(config, spec, base))


PLUGIN_FFN = {
    "tfkit": 1,
    "name": "plugin_ffn",
    "vocab_size": 96,
    "d_model": 16,
    "graph": {
        "embedding": "embedding",
        "decoder": {
            "block": "decoder",
            "n_layers": 2,
            "norm": "rmsnorm",
            "attention": {"kind": "mqa", "n_heads": 2, "d_head": 8, "position": "rope"},
            "ffn": {"kind": "sparse_glu", "d_ff": 24, "sparsity": [0.0, 0.9]},
        },
        "logits": {"block": "lm_head", "bias": True},
    },
}
SPECS: dict[str, ScaledSpec] = {
    "gpt2": ScaledSpec(
        "gpt2",
        DECODER,
        {"d_model": (32, 128), "decoder.attention.n_heads": (2, 8), "decoder.ffn.d_ff": (64, 384)},
    ),
    "llama": ScaledSpec(
        "llama3_8b",
        DECODER,
        {
            "d_model": (32, 128),
            "decoder.attention.n_heads": (4, 16),
            "decoder.attention.n_kv_heads": (2, 4),
            "decoder.ffn.d_ff": (48, 288),
        },
    ),
    "gemma2": ScaledSpec(
        "gemma2_2b",
        {**DECODER, "decoder.attention.n_heads": 4, "decoder.attention.n_kv_heads": 2},
        {"d_model": (32, 128), "decoder.attention.d_head": (8, 24), "decoder.ffn.d_ff": (48, 288)},
    ),
    "moe": ScaledSpec(
        "mixtral_8x7b",
        {**DECODER, "decoder.ffn.n_experts": 4, "decoder.attention.n_kv_heads": 2},
        {"d_model": (32, 128), "decoder.attention.n_heads": (4, 16), "decoder.ffn.d_ff": (24, 144)},
    ),
    "mla": ScaledSpec(
        "deepseek_v2_lite",
        {**DECODER, "decoder.attention.kv_rank": 16, "decoder.ffn.n_experts": 8},
        {
            "d_model": (32, 128),
            "decoder.attention.n_heads": (2, 6),
            "decoder.ffn.d_ff": (24, 144),
            "decoder.layers.variants.dense.ffn.d_ff": (48, 240),
        },
    ),
    "mamba2": ScaledSpec(
        "mamba2_130m",
        {**DECODER, "decoder.mixer.d_head": 8},
        {"d_model": (32, 128), "decoder.mixer.n_heads": (8, 32)},
    ),
    "gated_delta": ScaledSpec(
        "qwen3_next_80b_a3b",
        {**DECODER, "decoder.n_layers": 4, "decoder.ffn.n_experts": 16, "decoder.attention.d_head": 64},
        {
            "d_model": (32, 128),
            "decoder.ffn.d_ff": (24, 144),
            "decoder.attention.n_heads": (2, 8),
            "decoder.layers.variants.linear.mixer.n_heads": (4, 16),
            "decoder.layers.variants.linear.mixer.n_key_heads": (2, 8),
        },
    ),
    "hyper_connections": ScaledSpec(
        "mhc_small",
        DECODER,
        {"d_model": (32, 128), "decoder.attention.n_heads": (2, 8), "decoder.ffn.d_ff": (48, 288)},
    ),
    "t5": ScaledSpec(
        "t5_small",
        {"encoder.n_layers": 2, "decoder.n_layers": 2, "vocab_size": 96},
        {
            "d_model": (32, 128),
            "encoder.attention.n_heads": (2, 6),
            "decoder.attention.n_heads": (2, 6),
            "encoder.ffn.d_ff": (48, 288),
            "decoder.ffn.d_ff": (48, 288),
        },
    ),
    "vit": ScaledSpec(
        "vit_base_16",
        {"encoder.n_layers": 2},
        {"d_model": (32, 128), "encoder.attention.n_heads": (2, 8), "encoder.ffn.d_ff": (48, 288)},
    ),
    "bert": ScaledSpec(
        "bert_base",
        {"encoder.n_layers": 2, "vocab_size": 96},
        {"d_model": (32, 128), "encoder.attention.n_heads": (2, 8), "encoder.ffn.d_ff": (48, 288)},
    ),
    "plugin_ffn": ScaledSpec(
        PLUGIN_FFN,
        {},
        {"d_model": (16, 64), "decoder.ffn.d_ff": (24, 144), "decoder.attention.n_heads": (2, 8)},
    ),
}

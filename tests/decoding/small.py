"""Small models whose outputs reveal every difference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, fx

import tfkit
from tfkit import CachedModel
from tfkit.graph.expand import Graph

PLUGINS = tfkit.load_plugins(plugin_dirs=[Path(__file__).parents[2] / "plugins/tfkit-additive/src"], entry_points=False)
STACK = {"block": "decoder", "input": "embedding", "n_layers": 2, "ffn": {"kind": "gelu", "d_ff": 24}}
ROPE = {"n_heads": 4, "position": "rope"}


def spec_of(stack: Mapping[str, Any], embedding: Mapping[str, Any] | None = None, **inputs: Any) -> str:
    """The spec of a decoder with these fields between an embedding of `tokens` and a head."""
    graph = {
        "embedding": {"block": "embedding", "input": "tokens", **(embedding or {})},
        "decoder": {**STACK, **stack},
        "logits": {"block": "lm_head"},
    }
    head = {"tfkit": 1, "name": "m", "d_model": 16, "vocab_size": 23, "max_len": 40}
    return yaml.safe_dump({**head, "inputs": {"tokens": "tokens", **inputs}, "graph": graph}, sort_keys=False)


def build(spec: str | Graph) -> fx.GraphModule:
    """The model of a spec, in eval mode, with weights so large that small mistakes become large differences."""
    graph = spec if isinstance(spec, Graph) else tfkit.loads(spec, plugins=PLUGINS)
    model = tfkit.build(graph).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            factor = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(1.0 if factor else 0.0, 0.4, generator=generator)
    return model


ATTENTION = {"n_heads": 4, "position": "rope"}
SPECS = {
    "decoder": spec_of({"attention": ATTENTION}),
    "learned": spec_of({"attention": {"n_heads": 4}}, {"position": "learned"}),
    "window": spec_of({"attention": {**ATTENTION, "mask": {"left": 2, "right": 0}}}),
    "dynamic": spec_of(
        {
            "attention": {
                "n_heads": 4,
                "position": {"kind": "rope", "scaling": {"kind": "dynamic", "factor": 4.0, "original_max_len": 4}},
            }
        }
    ),
    "memory": spec_of({"attention": ATTENTION, "memory": "source"}, source={"type": "features", "width": 12}),
    "prefix": spec_of({"attention": ATTENTION, "prefix": "known"}, known="lengths"),
    "types": spec_of({"attention": ATTENTION}, {"tables": {"types": 3}}, types="tokens"),
    "features": """
tfkit: 1
name: m
inputs: {x: {type: features, width: 16}}
graph:
  decoder: {block: decoder, d_model: 16, n_layers: 2, attention: {n_heads: 4, position: rope}}
""",
    "memory_of_two": """
tfkit: 1
name: m
d_model: 16
vocab_size: 23
max_len: 40
inputs: {a: {type: features, width: 16}, b: {type: features, width: 16}, tokens: tokens}
graph:
  memory: {block: concat, inputs: [a, b]}
  embedding: {block: embedding, input: tokens}
  decoder: {block: decoder, input: embedding, memory: memory, n_layers: 2, attention: {n_heads: 4}}
  logits: {block: lm_head}
""",
}


def cached(name: str, length: int = 12, **options: Any) -> CachedModel:
    return CachedModel(build(SPECS[name]), length=length, **options)


def tokens(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randint(23, (rows, columns), generator=torch.Generator().manual_seed(seed))


def error(actual: Tensor, want: Tensor) -> float:
    return float((actual - want).detach().abs().max())

"""Weights with the traces that training leaves, without a training."""

from __future__ import annotations

from pathlib import Path

import torch

import tfkit
from tfkit.checkpoint.weight_map import places

LLAMA = """
extends: llama3_8b
name: small
d_model: 64
vocab_size: 97
graph:
  decoder: {n_layers: 5, attention: {n_heads: 4, n_kv_heads: 2}, ffn: {d_ff: 96}}
"""


def publish(folder: Path) -> None:
    """Write a published folder whose weights are balanced."""
    model = tfkit.build(tfkit.loads(LLAMA))
    balanced(model)
    tfkit.save(model, folder, layout="huggingface")


def balanced(model: torch.fx.GraphModule) -> None:
    """Give each unit between two tensors of a layer a size of its own on both sides; units of a gate lean one way."""
    state, found = model.state_dict(), places(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for number in range(5):
            part = {name.split(".", 3)[3]: place.view(state) for name, place in found.items() if f"s.{number}." in name}
            up, gate, down = (part[f"ffn.{name}.weight"] for name in ("up", "gate", "down"))
            size = (torch.randn(len(up), generator=generator) * 0.7).exp()
            up.mul_(size[:, None])
            gate.mul_(size[:, None]).add_(gate.std())
            down.mul_(size)
            value, output = part["attention.project.v.weight"], part["attention.output.weight"]
            size = (torch.randn(len(value), generator=generator) * 0.7).exp()
            value.mul_(size[:, None])
            output.mul_(size.view(2, 1, 16).expand(2, 2, 16).flatten())

"""Bugs of what is stored: ties, and tensors in the wrong place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tfkit.checkpoint.weight_map import Link, WeightMap
from tfkit.components import head
from tfkit.tools.save import save

from .bug import plant

make = head.TiedOutput.__init__
views = WeightMap.views


@plant("a tie is lost on the meta device", "Modalities/modalities#357", "gpt2", "copies", head.TiedOutput, "__init__")
def untied(self: Any, d_out: int, *, bias: bool) -> None:
    make(self, d_out, bias=bias)
    self.own = nn.Linear(32, d_out, bias=False)


@plant("a tied table is written as an empty tensor", "pytorch/torchtitan#3764", "gpt2", "save", save, "save_model")
def emptied(model: nn.Module, file: str, metadata: Any) -> None:
    state = {name: x if name != "embedding.tokens.weight" else torch.empty(0) for name, x in model.state_dict().items()}
    save_file(state, Path(file), metadata)


@plant("a converter exchanges gate and up", "two names of one shape", "trained", "places", WeightMap, "views")
def exchanged(self: Any, link: Link, state: Mapping[str, Tensor]) -> list[Tensor]:
    gate, up = (f"decoder.layers.1.ffn.{name}.weight" for name in ("gate", "up"))
    other = {gate: up, up: gate}
    return views(self, replace(link, model=tuple(other.get(name, name) for name in link.model)), state)

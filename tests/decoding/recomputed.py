"""An oracle for `CachedModel` with the same interface, which recomputes the full forward for every piece."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from tfkit.building.builder import graph_of
from tfkit.decoding.cached import CachedModel
from tfkit.graph.decode_split import split_for_decoding
from tfkit.graph.input_shapes import max_len


class Recomputed(CachedModel):
    """Keeps all tokens, and runs the model's own forward on them."""

    def __init__(self, model: fx.GraphModule, *, length: int | None = None) -> None:
        self.model = model
        self.length = length or max_len(graph_of(model)) or 10_000
        self.name = split_for_decoding(graph_of(model)).step_inputs[0]
        self.used = 0

    def start(self, batch: int, **inputs: Tensor) -> None:
        self.inputs = inputs
        self.tokens = torch.zeros(batch, 0, dtype=torch.long)
        self.mask = torch.zeros(batch, 0, dtype=torch.bool)
        self.used = 0

    def __call__(self, tokens: Tensor, mask: Tensor | None = None, *, keep: int = 0) -> Tensor:
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self.mask = torch.cat([self.mask, mask], dim=1)
        self.used += tokens.size(1)
        assert self.used <= self.length
        with torch.no_grad():
            logits = self.model(**{self.name: self.tokens, f"{self.name}_mask": self.mask, **self.inputs})
        return logits[:, -(keep or tokens.size(1)) :]

    def repeat(self, n: int) -> None:
        self.tokens, self.mask = (item.repeat_interleave(n, dim=0) for item in (self.tokens, self.mask))
        self.inputs = {name: value.repeat_interleave(n, dim=0) for name, value in self.inputs.items()}

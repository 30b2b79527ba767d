"""The sizes of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["gpt2", "llama"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of a batch; a gpt2 has as many key-value heads as query heads."""

    family: Family
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    vocab_size: int
    length: int
    batch: int

    @property
    def d_head(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_heads

    def __str__(self) -> str:
        heads = f"{self.n_heads}/{self.n_kv_heads}" if self.n_heads != self.n_kv_heads else f"{self.n_heads}"
        sizes = f"{self.n_layers} layers of width {self.d_model}, {heads} heads, FFN {self.d_ff}"
        return f"{self.family}: {sizes}, vocabulary {self.vocab_size}, {self.batch} x {self.length} tokens"

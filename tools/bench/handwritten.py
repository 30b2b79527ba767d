"""GPT-2 as one would write it by hand, to hold tfkit against: the same operations, no configuration, no parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention with one matrix for queries, keys and values."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.output = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q = q.view(batch, length, self.n_heads, -1).transpose(1, 2)
        k = k.view(batch, length, self.n_heads, -1).transpose(1, 2)
        v = v.view(batch, length, self.n_heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class FFN(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff)
        self.down = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Layer(nn.Module):
    """Pre-LN: each part reads a normalized copy of the stream and adds to it."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, n_heads)
        self.ffn_norm = nn.LayerNorm(d_model)
        self.ffn = FFN(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class GPT2(nn.Module):
    """Token ids [b, t] -> logits [b, t, vocab_size]; the head is the token table."""

    def __init__(self, *, n_layers: int, d_model: int, n_heads: int, d_ff: int, vocab_size: int, max_len: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(max_len, d_model)
        self.layers = nn.ModuleList(Layer(d_model, n_heads, d_ff) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def copy_from(self, model: nn.Module) -> None:
        """Take the weights of the tfkit model of the same shape, so that the two compute the same."""
        renamed = {}
        for name, value in model.state_dict().items():
            for old, new in RENAMED:
                name = name.replace(old, new)
            renamed[name] = value
        self.load_state_dict(renamed)


RENAMED = (
    ("embedding.tokens.", "tokens."),
    ("embedding.position.table.", "positions."),
    ("decoder.final_norm.", "norm."),
    ("decoder.", ""),
    ("_norm_in.", "_norm."),
    ("project.qkv.", "qkv."),
)

"""Handwritten GPT-2 and Llama for comparisons with tfkit: no configuration, no components, no options."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GPT2Attention(nn.Module):
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


class GPT2FFN(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff)
        self.down = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class GPT2Layer(nn.Module):
    """Pre-LN: each sublayer reads a normalized copy of the stream and adds to it."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = GPT2Attention(d_model, n_heads)
        self.ffn_norm = nn.LayerNorm(d_model)
        self.ffn = GPT2FFN(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class GPT2(nn.Module):
    """Token ids [b, t] -> logits [b, t, vocab_size]; the head is the token table."""

    def __init__(self, *, n_layers: int, d_model: int, n_heads: int, d_ff: int, vocab_size: int, max_len: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(max_len, d_model)
        self.layers = nn.ModuleList(GPT2Layer(d_model, n_heads, d_ff) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel i of each head together with channel i + d_head / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaAttention(nn.Module):
    """Causal self-attention in which groups of query heads share a key-value head."""

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.d_head = d_model // n_heads
        self.widths = [d_model, n_kv_heads * self.d_head, n_kv_heads * self.d_head]
        self.qkv = nn.Linear(d_model, sum(self.widths), bias=False)
        self.output = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(self.widths, dim=2)
        q = q.view(batch, length, -1, self.d_head).transpose(1, 2)
        k = k.view(batch, length, -1, self.d_head).transpose(1, 2)
        v = v.view(batch, length, -1, self.d_head).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class LlamaFFN(nn.Module):
    """SwiGLU."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaLayer(nn.Module):
    """Pre-norm, with RMSNorm."""

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int, d_ff: int, eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model, eps)
        self.attention = LlamaAttention(d_model, n_heads, n_kv_heads)
        self.ffn_norm = nn.RMSNorm(d_model, eps)
        self.ffn = LlamaFFN(d_model, d_ff)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids [b, t] -> logits [b, t, vocab_size]; cosines and sines are computed once."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        *,
        n_layers: int,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        d_ff: int,
        vocab_size: int,
        max_len: int,
        theta: float,
        eps: float,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList(LlamaLayer(d_model, n_heads, n_kv_heads, d_ff, eps) for _ in range(n_layers))
        self.norm = nn.RMSNorm(d_model, eps)
        self.output = nn.Linear(d_model, vocab_size, bias=False)
        d_head = d_model // n_heads
        frequencies = theta ** (-torch.arange(0, d_head, 2) / d_head)
        angles = torch.outer(torch.arange(max_len), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        cos, sin = self.cos[: tokens.size(1)], self.sin[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))

"""gpt2: 124M: pre-LN, learned positions, tied head

Source: https://github.com/openai/gpt-2
b batch, t positions, h heads, d width of a head.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    d_model: int = 768
    vocab_size: int = 50257
    max_len: int = 1024
    dropout: float = 0.1
    n_heads: int = 12
    d_ff: int = 3072
    n_layers: int = 12

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads


class Positions(nn.Module):
    """Positions of the tokens, passed or counted without padding, [b or 1, t]."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        positions = torch.arange(x.size(1), device=x.device)[None] if mask is None else mask.long().cumsum(dim=1) - 1
        return positions if mask is None else positions.clamp(min=0)


class Learned(nn.Module):
    """Positions [b, t] -> [b, t, width]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.table = nn.Embedding(config.max_len, config.d_model)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table(positions)


class Embedding(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = Positions()
        self.position = Learned(config)
        self.dropout = nn.Dropout(p=config.dropout)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)  # [b, t, 768]
        return self.dropout(x + self.position(self.positions(x, mask)).to(x.dtype))


class AttentionContext(nn.Module):
    """The values that the attentions of several layers share, from sequences x [b, t, d_model]."""

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor | None:
        queries = torch.arange(x.size(1), device=x.device)[None]  # [1, t]
        mask = None
        if padding is not None:
            visible = self.visible(queries, queries, padding)
            mask = torch.zeros(visible.shape, dtype=x.dtype, device=x.device).masked_fill(~visible, -math.inf)
        return mask

    def visible(self, queries: Tensor, keys: Tensor, tokens: Tensor | None) -> Tensor | None:
        """Return the keys that each query may attend to, bool [b or 1, 1, q or 1, k]; None for all keys."""
        visible = keys[:, None, :] - queries[:, :, None] <= 0
        return (visible & tokens[:, None, :].to(torch.bool))[:, None]


class FusedProjection(nn.Module):
    """Queries, keys and values of one sequence in one matrix."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.h = [config.n_heads, config.n_heads, config.n_heads]
        self.d = config.d_head
        self.qkv = nn.Linear(config.d_model, 3 * config.n_heads * config.d_head)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # b t (h d) -> b h t d
        q, k, v = self.qkv(x).unflatten(2, (-1, self.d)).split_with_sizes(self.h, dim=2)  # [b, t, 12, 64]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class ScaledDotProduct(nn.Module):
    """Queries [b, h, q, d], keys and values [b, g, k, d] -> [b, h, q, d], by torch's fused kernels."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.scale = config.d_head ** (-0.5)
        self.dropout = config.dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        causal = mask is None
        if causal and q.size(2) != k.size(2):
            causal = False
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=self.scale)


class Attention(nn.Module):
    """[b, q, d_model] -> [b, q, d_model]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.project = FusedProjection(config)
        self.core = ScaledDotProduct(config)
        self.output = nn.Linear(config.n_heads * config.d_head, config.d_model)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.project(x)  # [b, 12, t, 64]
        # b h q d -> b q (h d)
        return self.output(self.core(q, k, v, mask).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """down(norm(activation(up(x))))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_ff)
        self.activation = nn.GELU(approximate="tanh")
        self.down = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm_in = nn.LayerNorm(config.d_model)
        self.attention = Attention(config)
        self.attention_dropout = nn.Dropout(p=config.dropout)
        self.ffn_norm_in = nn.LayerNorm(config.d_model)
        self.ffn = MLP(config)
        self.ffn_dropout = nn.Dropout(p=config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm_in(x), mask))  # [b, t, 768]
        return x + self.ffn_dropout(self.ffn(self.ffn_norm_in(x)))


class Stack(nn.Module):
    """Layers one after the other: [b, t, d_model] -> [b, t, d_model]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.shared = nn.ModuleDict({"base": AttentionContext()})
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.final_norm = nn.LayerNorm(config.d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        contexts = [shared(x, mask) for shared in self.shared.values()]
        for layer in self.layers:
            x = layer(x, contexts[0])  # [b, t, 768]
        return self.final_norm(x)


class Gpt2(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = Embedding(config)
        self.decoder = Stack(config)
        self._init_weights(config)

    def forward(self, tokens: Tensor, tokens_mask: Tensor | None = None) -> Tensor:
        if tokens_mask is not None and tokens_mask.dim() == 3:
            raise ValueError("tokens_mask has pairs of tokens, but here it can only tell tokens [b, t] from padding")
        if tokens_mask is not None and tokens_mask.is_floating_point():
            raise ValueError(
                "tokens_mask is not bool or 0 and 1, with 1 for a token: `mask.bool()`; if additive, `mask == 0`"
            )
        tokens_mask = None if tokens_mask is None else tokens_mask.to(torch.bool)
        decoder = self.decoder(self.embedding(tokens, mask=tokens_mask), mask=tokens_mask)  # [b, t, 768]
        return F.linear(decoder, self.embedding.tokens.weight)

    def _init_weights(self, config: Config) -> None:
        """Normal; projections into the residual stream are divided by sqrt(2 n_layers)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                if name.endswith((".output", ".down")):
                    std = 0.02 / math.sqrt(2 * config.n_layers)
                    nn.init.normal_(module.weight, std=std)
                else:
                    nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)


if __name__ == "__main__":
    with torch.device("meta"):  # shapes without memory
        model = Gpt2(Config())
        output = model(tokens=torch.zeros(1, 16, dtype=torch.long))
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters, {output.shape=}")

"""Disentangled attention: scores of the content of tokens against their relative position, and the reverse.

    score = scale * (q . k + q . row_k + row_q . k)

The row stands for the distance from key to query: each short distance has a row, and long distances share rows that
grow logarithmically. There are as many rows for later keys, unless the attention is causal. All layers share the rows,
and each layer projects them to queries and keys.

b batch, q queries, k keys, h heads, n rows, d width of a head.

https://arxiv.org/abs/2006.03654. Logarithmic rows, shared projections: https://arxiv.org/abs/2111.09543.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.component import (
    AttentionConfig,
    Changeable,
    ContentScoreConfig,
    Dim,
    Immaterial,
    Make,
    NormConfig,
    Probability,
)
from tfkit.components.attention import MultiHeadConfig
from tfkit.errors import Invalid
from tfkit.nn import Linear, Rearrange, Table, named


class DisentangledConfig(ContentScoreConfig):
    """Adds to the scores the products of queries with rows for relative positions, and of such rows with keys."""

    kind: Literal["disentangled"] = "disentangled"
    terms: tuple[Literal["c2p", "p2c"], ...] = ("c2p", "p2c")
    """Products to add: queries times keys of the rows (`c2p`), queries of the rows times keys (`p2c`)."""
    max_distance: Dim = 512
    """Distance from which all distances on a side share its last row."""
    n_buckets: Dim | None = None
    """Number of rows on each side; null: `max_distance`, a row for each distance."""
    shared: bool = False
    """If true, the projections of the tokens also project the rows; if false, there are separate projections."""
    norm: NormConfig | None = None
    """Norm of the rows."""
    dropout: Immaterial[Changeable[Probability]] = 0.0
    """Dropout on the rows, before all layers project them."""

    @property
    def n_terms(self) -> int:
        return len(self.terms)

    @property
    def rows(self) -> int:
        """Number of rows on each side."""
        return self.n_buckets or self.max_distance

    def check(self) -> None:
        super().check()
        if not self.terms or len(set(self.terms)) < len(self.terms):
            raise Invalid("terms", f"terms must name c2p, p2c or both, each once; got {list(self.terms)}")
        if self.n_buckets is not None and not 4 <= self.n_buckets < self.max_distance:
            message = f"n_buckets must be at least 4 and below max_distance ({self.max_distance}); got {self.n_buckets}"
            raise Invalid("n_buckets", message)

    def build(self, make: Make, attention: AttentionConfig, causal: bool) -> nn.Module:
        return RelativeRows(self, attention.d_model, make(self.norm, attention.d_model) if self.norm else None, causal)

    def build_projection(self, attention: AttentionConfig) -> nn.Module | None:
        assert isinstance(attention, MultiHeadConfig)
        return None if self.shared else RowProjection(self, attention)

    def build_scores(self, attention: AttentionConfig, scale: float) -> nn.Module:
        return ContentScores(self, attention.n_heads // attention.kv_heads, scale)


class RelativeRows(nn.Module):
    """Positions of queries [b or 1, q] and keys [b or 1, k] -> rows [1, n, d_model] and indices [b or 1, q, k]."""

    def __init__(self, config: DisentangledConfig, width: int, norm: nn.Module | None, causal: bool) -> None:
        super().__init__()
        self.rows = config.rows
        self.later_rows = 0 if causal else config.rows
        self.max_distance = config.max_distance
        self.logarithmic = config.n_buckets is not None
        self.dropout = config.dropout
        self.table = Table(self.later_rows + config.rows, width)
        self.norm = norm

    def forward(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.table.weight
        if self.norm is not None:
            rows = self.norm(rows)
        rows = F.dropout(rows, self.dropout, self.training)
        distance = queries[:, :, None] - keys[:, None, :]
        if self.logarithmic:
            distance = self.bucket(distance)
        return rows[None], (distance + self.later_rows).clamp(0, self.later_rows + self.rows - 1)

    def bucket(self, distance: Tensor) -> Tensor:
        """Map distances to buckets: distances up to `near` stay, longer distances share buckets."""
        near = self.rows // 2
        longest = torch.tensor((self.max_distance - 1) / near, device=distance.device)
        # The logarithms and quotients of DeBERTa's order: at `max_distance` - 1 the last bit decides.
        ratio = distance.abs().clamp(min=near) / near
        distant = torch.ceil(torch.log(ratio) / torch.log(longest) * (near - 1)).long() + near
        return torch.where(distance.abs() <= near, distance, distant * distance.sign())

    def extra_repr(self) -> str:
        return named(rows=self.later_rows + self.rows, max_distance=self.max_distance, dropout=self.dropout)


class RowProjection(nn.Module):
    """Rows [1, n, d_model] -> their queries and keys [1, h, n, d]; the rows for queries or keys that no term uses."""

    def __init__(self, config: DisentangledConfig, attention: MultiHeadConfig) -> None:
        super().__init__()
        d, width, biases = attention.head_width, attention.d_model, attention.biases
        self.q = Linear(width, attention.n_heads * d, bias=biases.q) if "p2c" in config.terms else None
        self.k = Linear(width, attention.kv_heads * d, bias=biases.k) if "c2p" in config.terms else None
        self.split_heads = Rearrange("b n (h d) -> b h n d", d=d)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = rows, rows
        if self.q is not None:
            q = self.split_heads(self.q(rows))
        if self.k is not None:
            k = self.split_heads(self.k(rows))
        return q, k, rows


class ContentScores(nn.Module):
    """Queries and keys [b, h or g, q or k, d], queries and keys of rows, and indices [b or 1, q, k] -> [b, h, q, k].

    Each of the g heads of keys belongs to r heads of queries.
    """

    def __init__(self, config: DisentangledConfig, r: int, scale: float) -> None:
        super().__init__()
        self.r = r
        self.content_to_position = "c2p" in config.terms
        self.position_to_content = "p2c" in config.terms
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, row_q: Tensor, row_k: Tensor, index: Tensor) -> Tensor:
        index = index[:, None].expand(q.size(0), q.size(1), -1, -1)
        scores: Tensor | None = None
        if self.content_to_position:
            scores = ((q * self.scale) @ self.by_query(row_k).mT).gather(3, index)
        if self.position_to_content:
            products = (self.by_query(k) @ (row_q * self.scale).mT).gather(3, index.mT).mT
            scores = products if scores is None else scores + products
        assert scores is not None
        return scores

    def by_query(self, k: Tensor) -> Tensor:
        """Repeat keys [b, g, k, d] for each head of queries."""
        return k if self.r == 1 else k.repeat_interleave(self.r, dim=1)

    def extra_repr(self) -> str:
        return named(f"scale={self.scale:.6g}", c2p=self.content_to_position, p2c=self.position_to_content)

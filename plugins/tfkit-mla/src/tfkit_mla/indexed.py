"""Latent attention to the keys that an index chooses: each query attends to the `keep` keys with the highest scores.

    score(q, k) = sum over heads of  weight_h(q) * relu(query_h(q) . key(k)) * scale

The heads of the index are small, and share a key per token. The choice has no gradient, and neither have the parameters
of the index: they come from a checkpoint, or need a separate loss.

With `index_name`, a layer gives its choice to later layers. With `index_from`, a layer has no index, and attends to the
keys that an earlier layer chose (https://arxiv.org/abs/2603.12201).

b batch, q queries, k keys, h heads of the index, d their width, p rotated channels.

https://arxiv.org/abs/2512.02556, section 2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit.nn import Context, Linear, Rearrange, choose_top, named, rotary_of, update_cache, wires_of
from tfkit_mla import LatentAttention, LatentAttentionConfig


class IndexConfig(tfkit.Config):
    """The index: its heads, and the number of keys that it keeps."""

    n_heads: tfkit.Count
    """Number of heads."""
    d_head: tfkit.Dim
    """Width of a head."""
    keep: tfkit.Extent
    """Number of keys that a query attends to."""
    style: Literal["half", "interleaved"] = "half"
    """Pairs of channels that rotary positions rotate, as in `rope`, whatever pairs the attention has."""
    norm: tfkit.NormConfig = tfkit.slot("layernorm")
    """Norm of the keys."""

    def check(self) -> None:
        super().check()
        if self.keep < 1:
            raise tfkit.Invalid("keep", f"keep must be at least 1; got {self.keep}")


class IndexedAttentionConfig(LatentAttentionConfig):
    """Latent attention to the keys that an index chooses for each query."""

    kind: Literal["mla_indexed"] = "mla_indexed"  # type: ignore[assignment]
    chooses_keys: ClassVar[bool] = True
    takes_memory: ClassVar[bool] = False
    untrained: ClassVar[tuple[str, ...]] = ("index",)
    score_parameters: ClassVar[tuple[str, ...]] = ("index.weight.weight",)
    q_rank: tfkit.Dim  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]
    """Width of the latent of the queries, from which the index computes its queries also."""
    index: IndexConfig | None = None
    """The index; null with `index_from`."""
    index_name: str | None = None
    """Name under which later layers take the choice of the index."""
    index_from: str | None = None
    """Name of the choice that replaces an index; the last earlier layer with this name gives it."""

    def check(self) -> None:
        super().check()
        if (self.index is None) == (self.index_from is None):
            message = "`index` is missing" if self.index is None else "`index` has no effect with `index_from`"
            raise tfkit.Invalid("index", message, help="set `index`, or `index_from`, and the other to null")
        if self.index is None:
            if self.index_name is not None:
                raise tfkit.Invalid("index_name", "`index_name` has no effect with `index_from`", help="set it to null")
            return
        if self.position is not None and self.rotary is None:
            raise tfkit.Invalid("position", "the index supports rotary positions only")
        if self.index.d_head < self.d_rope:
            message = f"the index must have at least d_rope channels, {self.d_rope}; got {self.index.d_head}"
            raise tfkit.Invalid("index.d_head", message)

    def causal_flag(self, backend: tfkit.AttentionBackend) -> bool:
        return False  # the index needs the mask: it must not choose a hidden key instead of a visible key

    @property
    def cached(self) -> tuple[tfkit.Cached, ...]:
        return super().cached if self.index is None else (*super().cached, tfkit.Cached(1, self.index.d_head))

    @property
    def gives(self) -> tuple[str, ...]:
        return () if self.index_name is None else (self.index_name,)

    @property
    def takes(self) -> tuple[str, ...]:
        return () if self.index_from is None else (self.index_from,)

    def check_giver(self, name: str, giver: tfkit.SublayerConfig) -> None:
        if self.mask != getattr(giver, "mask", None):
            raise tfkit.Invalid("index_from", f"`mask` must be equal in the layer that gives {name}")

    def build(self, make: tfkit.Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        modules: dict[str, Any] = {**self._build_queries(make), **self._build_keys(make, self.d_model)}
        modules |= {"causal": causal, "eager": make.attention_backend == "eager"}
        if self.index is None:
            return SharedIndexAttention(self, **modules)
        attention = IndexedAttention if self.index_name is None else GivingIndexAttention
        return attention(self, index=Index(self, self.index, make), **modules)


class SharedIndexAttention(LatentAttention):
    """[b, q, d_model] -> [b, q, d_model]; the context has the choice of an earlier layer."""

    def __init__(self, config: IndexedAttentionConfig, **modules: Any) -> None:
        super().__init__(config, **modules)
        self.choice = config.index_from or ""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.attend(x, self.queries(x), context, wires_of(context)[self.choice])


class IndexedAttention(LatentAttention):
    """[b, q, d_model] -> [b, q, d_model]."""

    if TYPE_CHECKING:  # `q_rank` is set
        q_down: nn.Module
        q_norm: nn.Module
        q_up: nn.Module

    def __init__(self, config: IndexedAttentionConfig, *, index: nn.Module, **modules: Any) -> None:
        super().__init__(config, **modules)
        self.index = index

    def forward(self, x: Tensor, context: Context) -> Tensor:
        latent = self.q_norm(self.q_down(x))
        return self.attend(x, self.q_up(latent), context, self.index(x, latent, context))


class GivingIndexAttention(IndexedAttention):
    """[b, q, d_model] -> the same, and the choice, a mask [b, 1, q, k]."""

    def __init__(self, config: IndexedAttentionConfig, **modules: Any) -> None:
        super().__init__(config, **modules)
        self.choice = config.index_name or ""

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        latent = self.q_norm(self.q_down(x))
        choice = self.index(x, latent, context)
        return self.attend(x, self.q_up(latent), context, choice), {self.choice: choice}


class Index(nn.Module):
    """Tokens [b, q, d_model] and the latents of their queries [b, q, c] -> a mask of the best keys, [b, 1, q, k]."""

    def __init__(self, config: IndexedAttentionConfig, index: IndexConfig, make: tfkit.Make) -> None:
        super().__init__()
        self.keep, self.width = index.keep, config.d_rope
        self.q = Linear(config.q_rank, index.n_heads * index.d_head, bias=False)
        self.k = Linear(config.d_model, index.d_head, bias=False)
        self.k_norm = make(index.norm, index.d_head)
        self.weight = Linear(config.d_model, index.n_heads, bias=False)
        self.scale = (index.n_heads * index.d_head) ** -0.5
        self.split_heads = Rearrange("b q (h d) -> b h q d", h=index.n_heads)
        self.one_head = Rearrange("b k d -> b 1 k d")
        self.heads_first = Rearrange("b q h -> b h q 1")
        self.rotate: nn.Module | None = None
        self.pairs: nn.Module | None = None
        if config.rotary is not None:
            style = config.rotary.model_copy(update={"style": index.style})
            self.rotate = style.build_rotation(config)
            if style != config.rotary:
                order = ("(i j)", "(j i)") if index.style == "half" else ("(j i)", "(i j)")
                self.pairs = Rearrange("w b h t {} -> w b h t {}".format(*order), j=2)

    def forward(self, x: Tensor, latent: Tensor, context: Context) -> Tensor:
        mask = context.mask
        q = self.turn(self.split_heads(self.q(latent)), context)
        k = update_cache(self.turn(self.one_head(self.k_norm(self.k(x))), context), context, 2)
        products = torch.relu(wide(q) @ wide(k).mT) * self.scale
        scores = (products * self.heads_first(wide(self.weight(x)))).sum(dim=1, keepdim=True)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        positions = context.key_positions
        if positions is not None:
            positions = positions[:, None, None]
        chosen = choose_top(scores, min(self.keep, scores.size(3)), positions)
        if mask is None:
            return chosen
        return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, -math.inf)

    def turn(self, x: Tensor, context: Context) -> Tensor:
        """Rotate the first channels of queries or keys, [b, heads, t, d]."""
        if self.rotate is None:
            return x
        table = rotary_of(context)
        if self.pairs is not None:
            table = self.pairs(table)
        return torch.cat((self.rotate(x[..., : self.width], table), x[..., self.width :]), dim=3)

    def extra_repr(self) -> str:
        return named(keep=self.keep, scale=f"{self.scale:.6g}")


def wide(x: Tensor) -> Tensor:
    """Return x with at least the precision of float32."""
    return x if x.dtype == torch.float64 else x.float()

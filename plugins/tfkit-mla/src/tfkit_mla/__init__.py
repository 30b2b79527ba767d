"""Multi-head latent attention: the keys and values of all heads come from one small vector per token, the latent.

    queries:  q_down -> norm -> q_up, or a matrix `q`; each head has channels without positions and rotated channels
    keys:     kv_down -> a latent, which is normed, and a rotated key that all heads share
    scores:   (q_nope . k_nope + q_rope . k_rope) * scale; kv_up computes k_nope and v of each head from the latent

A cache contains only the latent and the shared key: kv_rank + d_rope numbers per token, for any number of heads.

b batch, t positions, q queries, k keys, h heads, c kv_rank, n d_nope, p d_rope, v d_v, d two of these.

https://arxiv.org/abs/2405.04434, section 2.1 and appendix C. Scaled latents: https://arxiv.org/abs/2509.01322.
Temperature: https://arxiv.org/abs/2501.19399. Gate: https://arxiv.org/abs/2505.06708.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.nn import (
    Context,
    HeadGate,
    Linear,
    Rearrange,
    Softmax,
    is_scripting,
    is_untouched,
    named,
    rotary_of,
    update_cache,
)


class LatentAttentionConfig(tfkit.AttentionConfig):
    """Keys and values of all heads are expanded from one latent per token."""

    kind: Literal["mla"] = "mla"
    derived = MappingProxyType({})
    self_attention_only = MappingProxyType(
        {
            **tfkit.AttentionConfig.self_attention_only,
            "temperature": "cross-attention has no positions: no query has a temperature",
        }
    )
    d_head: ClassVar[None] = None  # type: ignore[misc]  # not a key of this kind: heads have three widths

    q_rank: tfkit.Dim | None = None
    """Width of the latent of the queries; null projects them straight from the residual stream."""
    kv_rank: tfkit.Dim
    """Width of the latent of keys and values."""
    d_nope: tfkit.Dim
    """Channels of each head's queries and keys that positions do not change."""
    d_rope: tfkit.Dim
    """Channels of each head's queries, and of the key that all heads share, that rotary positions rotate."""
    d_v: tfkit.Dim
    """Width of each head's values."""
    bias: tfkit.Shared[bool] = False
    """If true, q_down, kv_down and the output have biases; the projections to heads have none."""
    scale: tfkit.PositiveFloat | None = None
    """Factor of the scores. By default (d_nope + d_rope) ** -0.5; for a YaRN with `mscale_all_dim`, times the square of
    0.1 mscale_all_dim ln(factor) + 1."""
    kv_scale: tfkit.PositiveFloat = 1.0
    """Factor of the latent of keys and values after its norm."""
    latent_norm: tfkit.NormConfig = tfkit.slot("rmsnorm")
    """Norm of both latents."""
    temperature: tfkit.TemperatureConfig | None = None
    """Growth of queries with their position, against a softmax that flattens as more keys are read."""
    gate: tfkit.GateConfig | None = None
    """Gate of the outputs of the heads: factors that are computed from the input."""

    def check(self) -> None:
        """Raise `Invalid` for positions that cannot rotate d_rope channels. n_heads need not divide d_model."""
        if self.rotary is not None and self.d_rope % 2:
            raise tfkit.Invalid(
                "d_rope", f"d_rope must be even, because rotary positions rotate pairs of channels; got {self.d_rope}"
            )
        if self.position is not None:
            self.position.check_attention(self)

    @property
    def head_width(self) -> int:
        """The number of channels to rotate. Only rotary positions use the width of a head."""
        return self.d_rope

    @property
    def score_width(self) -> int:
        return self.d_nope + self.d_rope

    @property
    def score_scale(self) -> float:
        """The factor of the scores. YaRN scales only the rotated channels down; here all channels are scaled up."""
        if self.scale is not None:
            return self.scale
        scaling: Any = getattr(self.position, "scaling", None)
        growth = getattr(scaling, "mscale_all_dim", None)
        sharper = 1.0 if growth is None else 0.1 * growth * math.log(max(scaling.factor, 1.0)) + 1.0
        return self.score_width**-0.5 * sharper**2

    @property
    def pattern_sizes(self) -> Mapping[str, int]:
        """The letters that stand for sizes in a weight map: h heads, n d_nope, p d_rope, v d_v."""
        return {"h": self.n_heads, "n": self.d_nope, "p": self.d_rope, "v": self.d_v}

    @property
    def query_temperature(self) -> tfkit.TemperatureConfig | None:
        return self.temperature

    def causal_flag(self, backend: tfkit.AttentionBackend) -> bool:
        return backend != "eager"

    @property
    def cached(self) -> tuple[tfkit.Cached, ...]:
        return (tfkit.Cached(1, self.kv_rank), tfkit.Cached(1, self.d_rope))

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        return self.softmax_values("softmax")

    def build(self, make: tfkit.Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        d_source = self.d_model if d_memory is None else d_memory
        attention = LatentAttention if d_memory is None else CrossLatentAttention
        return attention(
            self,
            **self._build_queries(make),
            **self._build_keys(make, d_source),
            causal=causal,
            eager=make.attention_backend == "eager",
        )

    def _build_keys(self, make: tfkit.Make, d_source: int) -> dict[str, Any]:
        """Build the modules after the queries, for keys and values of `d_source` channels."""
        gate = self.gate
        return {
            "kv_down": Linear(d_source, {"latent": self.kv_rank, "rope": self.d_rope}, bias=self.bias),
            "kv_norm": make(self.latent_norm, self.kv_rank),
            "kv_up": Linear(self.kv_rank, self.n_heads * (self.d_nope + self.d_v), bias=False),
            "rotate": None if self.rotary is None else self.rotary.build_rotation(self),
            "gate": gate and HeadGate(self.d_model, self.n_heads, gate.factors_of(self.d_v), make(gate.activation)),
            "output": Linear(self.n_heads * self.d_v, self.d_model, bias=self.bias, residual=True),
        }

    def _build_queries(self, make: tfkit.Make) -> dict[str, Any]:
        width = self.n_heads * (self.d_nope + self.d_rope)
        if self.q_rank is None:
            return {"q": Linear(self.d_model, width, bias=False)}
        return {
            "q_down": Linear(self.d_model, self.q_rank, bias=self.bias),
            "q_norm": make(self.latent_norm, self.q_rank),
            "q_up": Linear(self.q_rank, width, bias=False),
        }


class LatentAttention(nn.Module):
    """[b, q, d_model] -> [b, q, d_model]; queries come from `q`, or from `q_down`, `q_norm` and `q_up`."""

    def __init__(
        self,
        config: LatentAttentionConfig,
        *,
        q: nn.Module | None = None,
        q_down: nn.Module | None = None,
        q_norm: nn.Module | None = None,
        q_up: nn.Module | None = None,
        kv_down: nn.Module,
        kv_norm: nn.Module,
        kv_up: Linear,
        rotate: nn.Module | None,
        gate: nn.Module | None,
        output: nn.Module,
        causal: bool,
        eager: bool,
    ) -> None:
        super().__init__()
        self.q = q
        self.q_down = q_down
        self.q_norm = q_norm
        self.q_up = q_up
        self.kv_down = kv_down
        self.kv_norm = kv_norm
        self.kv_up = kv_up
        self.rotate = rotate
        self.softmax = Softmax()
        self.gate = gate
        self.output = output
        self.n_heads = h = config.n_heads
        k_and_v = {"k": config.d_nope, "v": config.d_v}
        self.split_queries = Rearrange("b q (h d) -> b h q d", h=h, d={"nope": config.d_nope, "rope": config.d_rope})
        self.split_latent = Rearrange("b k c -> b 1 k c", c={"latent": config.kv_rank, "rope": config.d_rope})
        self.split_heads = Rearrange("b 1 k (h d) -> b h k d", h=h, d=k_and_v)
        self.split_weight = Rearrange("(h d) c -> h d c", h=h, d=k_and_v)
        self.merge_heads = Rearrange("b h q v -> b q (h v)")
        self.head_by_head = Rearrange("b h 1 n -> h b n")
        self.heads_as_queries = Rearrange("h b c -> b 1 h c")
        self.queries_as_heads = Rearrange("b 1 h c -> h b c")
        self.heads_of_query = Rearrange("h b v -> b h 1 v")
        self.swap = Rearrange("b h q d -> b q h d")
        self.scale = config.score_scale
        self.kv_scale = config.kv_scale
        self.dropout = config.dropout
        self.causal = causal
        self.eager = eager

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.attend(x, self.queries(x), context, context.mask)

    def attend(self, x: Tensor, q: Tensor, context: Context, mask: Tensor | None) -> Tensor:
        """Attend with queries [b, q, h * (n + p)] to the keys that the mask allows; [b, q, d_model]."""
        temperature = context.temperature
        if temperature is not None:
            q = q * temperature[:, 0]
        q_nope, q_rope = self.split_queries(q)
        q_rope = self.turn(q_rope, context)
        latent, k_rope = self.read(x, context)
        if context.cache is not None and x.size(1) == 1 and self.absorbs():
            mixed = self.absorbed(q_nope, q_rope, latent, k_rope, mask)
        else:
            mixed = self.expanded(q_nope, q_rope, latent, k_rope, mask)
        y = self.merge_heads(mixed)
        return self.output(y if self.gate is None else self.gate(y, x))

    def queries(self, x: Tensor) -> Tensor:
        """Compute the queries: [b, q, d_model] -> [b, q, h * (n + p)]."""
        if self.q_down is not None and self.q_norm is not None and self.q_up is not None:
            return self.q_up(self.q_norm(self.q_down(x)))
        assert self.q is not None
        return self.q(x)

    def turn(self, x: Tensor, context: Context) -> Tensor:
        """Rotate queries or the shared key, [b, heads, t, p]."""
        return x if self.rotate is None else self.rotate(x, rotary_of(context))

    def down(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the latent [b, 1, k, c] and the shared key [b, 1, k, p] from [b, k, d_source]."""
        latent, k_rope = self.split_latent(self.kv_down(source))
        latent = self.kv_norm(latent)
        return latent if self.kv_scale == 1.0 else latent * self.kv_scale, k_rope

    def read(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return the latents and the shared keys of all tokens: the tokens of x, and the cached tokens."""
        latent, k_rope = self.down(x)
        return update_cache(latent, context, 0), update_cache(self.turn(k_rope, context), context, 1)

    def expanded(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor | None) -> Tensor:
        """Attend to keys and values that are computed from every latent; [b, h, q, v]."""
        k_nope, v = self.split_heads(self.kv_up(latent))
        q = torch.cat((q_nope, q_rope), dim=3)
        k = torch.cat((k_nope, k_rope.expand(-1, self.n_heads, -1, -1)), dim=3)
        if self.eager:
            return self.weights(q @ k.mT, mask) @ v
        causal = self.causal and mask is None
        if causal and q.size(2) != k.size(2):  # only the newest token, which attends to the entire cache
            causal = False
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
            scale=self.scale,
        )

    def absorbs(self) -> bool:
        """Return True if the weight of `kv_up` may be read instead of calling the module."""
        if not is_scripting():
            return is_untouched(self.kv_up)
        return True

    def absorbed(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with a single query as `expanded` does, [b, h, 1, v], but without computing keys or values of tokens.

        (kv_up c) . q = c . (kv_up' q): the query is mapped to the space of latents, and the result back to values.
        """
        up_k, up_v = self.split_weight(self.kv_up.weight)
        q = self.heads_as_queries(torch.bmm(self.head_by_head(q_nope), up_k))
        scores = q @ latent.mT + self.swap(q_rope) @ k_rope.mT
        mixed = self.swap(self.weights(self.swap(scores), mask)) @ latent
        return self.heads_of_query(torch.bmm(self.queries_as_heads(mixed), up_v.mT))

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Turn scores [b, h, q, k] into attention weights of the same shape."""
        return F.dropout(self.softmax(scores * self.scale, mask), self.dropout, self.training)

    def extra_repr(self) -> str:
        return named(f"scale={self.scale:.6g}", kv_scale=self.kv_scale, dropout=self.dropout, causal=self.causal)


class CrossLatentAttention(LatentAttention):
    """[b, q, d_model] and a memory [b, k, d_memory] -> [b, q, d_model]; no positions, and no mask other than padding.

    When decoding incrementally, pass the memory once: its latents are cached.
    """

    def read(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        memory, cache = context.memory, context.cache
        if memory is None:
            assert cache is not None
            return cache.tensors[0], cache.tensors[1]
        latent, k_rope = self.down(memory)
        if cache is not None:
            cache.tensors[0].copy_(latent)
            cache.tensors[1].copy_(k_rope)
        return latent, k_rope


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    """Register the configs."""
    from tfkit_mla.differential import DifferentialConfig
    from tfkit_mla.fields import SharedIndexConfig
    from tfkit_mla.indexed import IndexedAttentionConfig

    register(LatentAttentionConfig)
    register(IndexedAttentionConfig)
    register(DifferentialConfig)
    register(SharedIndexConfig)


@tfkit.hookimpl
def tfkit_reference() -> dict[str, dict[str, Callable[..., Any]]]:
    """Return the formulas of the attentions."""
    from tfkit_mla import reference

    kinds = {"mla": reference.mla, "mla_indexed": reference.mla_indexed, "differential": reference.differential}
    return {"attention": kinds}

"""Multi-head attention: one pipeline of optional steps in a fixed order.

    project -> clip -> norm over the full width -> heads                                 projection.py
    -> norm per head -> rotate -> norm after it -> temperature of the queries            here
    -> scores (scale, soft-cap, position, mask) -> softmax with sinks -> values           attention_core.py, flex.py
    -> gate -> inner norm -> output                                                      here

`mha`, `gqa` and `mqa` are one module with different numbers of key-value heads. A plugin that computes scores in
another way subclasses `MultiHeadConfig` and overrides `build_core`.

b batch, t positions, q queries, k keys, h query heads, g key-value heads, d width of a head.

MHA: https://arxiv.org/abs/1706.03762. Multi-query: https://arxiv.org/abs/1911.02150.
Grouped-query: https://arxiv.org/abs/2305.13245. QK norm: https://arxiv.org/abs/2010.04245.
Softcap: https://arxiv.org/abs/2408.00118. Sinks: https://arxiv.org/abs/2309.17453.
Gate: https://arxiv.org/abs/2505.06708. Inner norm: https://arxiv.org/abs/2210.06423.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from torch import Tensor, nn

from tfkit.component import (
    AttentionBackend,
    Cached,
    Count,
    GateConfig,
    InnerValue,
    Make,
    NormConfig,
    PositiveFloat,
    State,
    SublayerConfig,
    TemperatureConfig,
    divisors,
)
from tfkit.components.attention_core import Eager, ScaledDotProduct, SinkDotProduct, SinkSoftmax
from tfkit.components.flex import MIN_WIDTH, FlexAttention
from tfkit.components.norm import WeightedNormConfig
from tfkit.components.projection import ProjectedConfig
from tfkit.errors import Invalid
from tfkit.nn import Context, HeadGate, Linear, Rearrange, rotary_of, update_cache, wires_of


class Attention(nn.Module):
    """[b, q, d_model] -> [b, q, d_model].

    Steps that a spec does not ask for are None and cost nothing. The classes below differ in the source of keys and
    values: they override `queries_keys_values`. `wires` are the names of the keys and values that layers share.
    """

    def __init__(
        self,
        *,
        project: nn.Module,
        q_norm: nn.Module | None,
        k_norm: nn.Module | None,
        v_norm: nn.Module | None,
        rotate: nn.Module | None,
        q_norm_rotated: nn.Module | None,
        k_norm_rotated: nn.Module | None,
        relative_project: nn.Module | None,
        relative: nn.Module | None,
        core: nn.Module,
        gate: nn.Module | None,
        inner_norm: nn.Module | None,
        output: nn.Module,
        wires: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.project = project
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.v_norm = v_norm
        self.rotate = rotate
        self.q_norm_rotated = q_norm_rotated
        self.k_norm_rotated = k_norm_rotated
        self.relative_project = relative_project
        self.relative = relative
        self.core = core
        self.gate = gate
        self.inner_norm = inner_norm
        self.merge_heads = Rearrange("b h q d -> b q (h d)")
        self.output = output
        self.wires = wires

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self.queries_keys_values(x, context)
        return self.merge(self.core(q, k, v, self.score_mask(q, k, context)), x)

    def queries_keys_values(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries of x [b, h, q, d], and all keys and values that they attend to, [b, g, k, d] each."""
        q, k, v = self.project(x)
        q, k = self.queries(q, context), self.keys(k, context)
        k, v = update_cache(k, context, 0), update_cache(self.values(v), context, 1)
        return q, k, v

    def queries(self, q: Tensor, context: Context) -> Tensor:
        """Apply the steps of queries: norm, rotate, norm, temperature."""
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.rotate is not None:
            q = self.rotate(q, rotary_of(context))
        if self.q_norm_rotated is not None:
            q = self.q_norm_rotated(q)
        temperature = context.temperature
        return q if temperature is None else q * temperature

    def keys(self, k: Tensor, context: Context) -> Tensor:
        """Apply the steps of keys: norm, rotate, norm."""
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.rotate is not None:
            k = self.rotate(k, rotary_of(context))
        return k if self.k_norm_rotated is None else self.k_norm_rotated(k)

    def values(self, v: Tensor) -> Tensor:
        """Apply the step of values: norm."""
        return v if self.v_norm is None else self.v_norm(v)

    def score_mask(self, q: Tensor, k: Tensor, context: Context) -> Tensor | None:
        """Return the mask, with the scores of content and positions added to it."""
        mask = context.mask
        if self.relative is not None:
            relative = context.relative
            assert relative is not None
            rows, index = relative
            if self.relative_project is None:
                row_q, row_k, _ = self.project(rows)
            else:
                row_q, row_k, _ = self.relative_project(rows)
            scores = self.relative(q, k, row_q, row_k, index)
            mask = scores if mask is None else scores + mask
        return mask

    def merge(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Merge the outputs of the heads [b, h, q, d] -> [b, q, d_model]; x is the layer's input."""
        y = self.merge_heads(mixed)
        if self.gate is not None:
            y = self.gate(y, x)
        if self.inner_norm is not None:
            y = self.inner_norm(y)
        return self.output(y)


class GivingAttention(Attention):
    """Attention that also gives its keys and values to later layers."""

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        q, k, v = self.queries_keys_values(x, context)
        y = self.merge(self.core(q, k, v, self.score_mask(q, k, context)), x)
        return y, {self.wires[0]: k, self.wires[1]: v}


class TakingAttention(Attention):
    """Attention to the keys and values of an earlier layer."""

    def queries_keys_values(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        wires = wires_of(context)
        return self.queries(self.project(x), context), wires[self.wires[0]], wires[self.wires[1]]


class CrossAttention(Attention):
    """[b, q, d_model] and a memory [b, k, d_memory] -> [b, q, d_model]; no positions, and only padding is masked.

    If sequences are read step by step, the memory is given once, and its keys and values are cached.
    """

    def queries_keys_values(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        q = self.queries(self.project.queries(x), context)  # type: ignore[operator]
        k, v = self.memory(context)
        return q, k, v

    def memory(self, context: Context) -> tuple[Tensor, Tensor]:
        """Return keys and values of the memory, [b, g, k, d] each."""
        memory, cache = context.memory, context.cache
        if memory is None:
            assert cache is not None
            return cache.tensors[0], cache.tensors[1]
        k, v = self.project.keys_values(memory)  # type: ignore[operator]
        k, v = self.keys(k, context), self.values(v)
        if cache is not None:
            cache.tensors[0].copy_(k)
            cache.tensors[1].copy_(v)
        return k, v


class MultiHeadConfig(ProjectedConfig):
    """Multi-head attention; a kind that changes one step of it derives from this config."""

    self_attention_only: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **ProjectedConfig.self_attention_only,
            "temperature": "cross-attention has no positions: no query has a temperature",
            "kv_name": "cross-attention cannot give its keys and values to other layers",
            "kv_from": "cross-attention cannot take the keys and values of other layers",
        }
    )

    scale: PositiveFloat | None = None
    """Factor of the scores; by default d_head ** -0.5, and with n terms of positions (d_head * (1 + n)) ** -0.5."""
    softcap: PositiveFloat | None = None
    """Bound of the scores, which are bent to stay within it: softcap * tanh(scores / softcap)."""
    sinks: bool = False
    """If true, the softmax of each head includes a learned score in addition to the scores of the keys."""
    qk_norm: NormConfig | None = None
    """Norm of each head's queries and keys, before they are rotated."""
    qk_norm_weight: Literal["shared", "per_head"] = "shared"
    """Weights of `qk_norm`: a single vector for all heads (`shared`), or a vector for each head (`per_head`)."""
    qk_norm_rotated: NormConfig | None = None
    """Norm of each head's queries and keys, after they are rotated."""
    value_norm: NormConfig | None = None
    """Norm of each head's values."""
    temperature: TemperatureConfig | None = None
    """Factor of the queries that grows with their position."""
    gate: GateConfig | None = None
    """Gate of the outputs of the heads: factors that are computed from the input."""
    inner_norm: NormConfig | None = None
    """Norm of the outputs of all heads as one vector, before the output projection."""
    kv_name: str | None = None
    """Name under which later layers take the keys and values of this layer."""
    kv_from: str | None = None
    """Name of keys and values of an earlier layer, which replace the layer's: of the latest layer that gives them."""

    def check(self) -> None:
        """Raise `Invalid` for fields without effect, and for content scores with keys that layers share."""
        super().check()
        for field in ("kv_name", "value_norm", "values") if self.kv_from is not None else ():
            if getattr(self, field) is not None:
                message = f"`{field}` has no effect: the keys and values come from an earlier layer"
                raise Invalid(field, message, help="set it to null")
        if self.content_scores is not None and (self.gives or self.takes):
            message = "`position` must not score tokens if keys and values are shared across layers"
            help = "choose a position such as `rope`, or remove `kv_name` and `kv_from`"
            raise Invalid("position", message, help=help)
        norm, field = self.qk_norm, "qk_norm_weight"
        if self.qk_norm_weight == "shared":
            return
        if norm is None:
            raise Invalid(field, "`qk_norm_weight` has no effect without `qk_norm`", help="add `qk_norm: layernorm`")
        if not isinstance(norm, WeightedNormConfig):
            raise Invalid(field, f"norm `{norm.kind_name()}` cannot have separate weights for each head")
        if not norm.scale:
            raise Invalid(field, "`qk_norm_weight` has no effect: the norm has no weights")

    @property
    def cached(self) -> tuple[Cached | State, ...] | None:
        return super().cached if self.kv_from is None else ()

    @property
    def gives(self) -> tuple[str, ...]:
        return _wires(self.kv_name)

    @property
    def takes(self) -> tuple[str, ...]:
        return _wires(self.kv_from)

    def check_giver(self, name: str, giver: SublayerConfig) -> None:
        for field in ("kv_heads", "head_width", "mask", "position"):
            if getattr(self, field) != getattr(giver, field, None):
                raise Invalid("kv_from", f"`{field}` must be equal in the layer that gives {name}")

    @property
    def inner_values(self) -> Mapping[str, InnerValue]:
        """Queries, keys and values that scores are computed from, scores, weights, and the output of each head."""
        if type(self).build is not MultiHeadConfig.build:  # a different module may not have a core
            return {}
        queries, keys = (f"[b, {h}, {t}, {self.head_width}]" for h, t in ((self.n_heads, "t"), (self.kv_heads, "k")))
        inputs = {"q": queries, "k": keys, "v": keys}
        values = {name: InnerValue("core", index, shape) for index, (name, shape) in enumerate(inputs.items())}
        softmax = self.softmax_values("core.softmax") if self._cores_are_ours else {}
        return values | softmax | {"heads": InnerValue("core", None, queries)}

    @property
    def query_temperature(self) -> TemperatureConfig | None:
        return self.temperature

    @property
    def adds_content_scores(self) -> bool:
        return type(self).build is MultiHeadConfig.build  # a different module may not add them

    @property
    def counts_tokens(self) -> bool:
        # After a rotation, scores depend only on the difference of two angles; weights after it would undo that.
        return self.qk_norm_rotated is not None

    def causal_flag(self, backend: AttentionBackend) -> bool:
        flag = self._cores_are_ours and self.content_scores is None
        return flag and self.softcap is None and backend != "eager"

    def flex_mask(self, backend: AttentionBackend) -> bool:
        ours = self._cores_are_ours and not self.sinks and self.content_scores is None
        return ours and backend == "flex" and self.dropout == 0 and self.head_width >= MIN_WIDTH

    @property
    def _cores_are_ours(self) -> bool:
        """True if no subclass replaces the core: a different core may not support flags, or masks as rules."""
        return type(self).build_core is MultiHeadConfig.build_core

    @property
    def score_scale(self) -> float:
        """The factor of the scores."""
        n_terms = 0 if self.content_scores is None else self.content_scores.n_terms
        return (self.head_width * (1 + n_terms)) ** -0.5 if self.scale is None else self.scale

    def build_core(self, make: Make, *, causal: bool) -> nn.Module:
        """Build the module that turns queries [b, h, q, d], keys and values [b, g, k, d] and a mask into [b, h, q, d].

        A subclass that overrides it gets its mask as a tensor, and `causal` is never set. A module with parameters of
        its own fills them in `reset_parameters`; one with a softmax uses `tfkit.nn.Softmax`, which shows the weights.
        """
        scale = self.score_scale
        heads = (self.n_heads, self.kv_heads)
        grouped, fused = self.kv_heads != self.n_heads, self.softcap is None and make.attention_backend != "eager"
        softmax = SinkSoftmax(self.n_heads) if self.sinks else None
        if fused and softmax is not None:
            return SinkDotProduct(scale=scale, dropout=self.dropout, causal=causal, heads=heads, softmax=softmax)
        core: nn.Module
        if fused:
            core = ScaledDotProduct(scale=scale, dropout=self.dropout, causal=causal, grouped=grouped)
        else:
            core = Eager(scale=scale, dropout=self.dropout, heads=heads, cap=self.softcap, softmax=softmax)
        if self.flex_mask(make.attention_backend):
            return FlexAttention(scale=scale, cap=self.softcap, grouped=grouped, dense=core)
        return core

    def build(self, make: Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        width, rotated, taking = self.head_width, self.qk_norm_rotated, self.kv_from is not None
        gate = self.gate
        attention = Attention if d_memory is None else CrossAttention
        if self.gives:
            attention = GivingAttention
        elif taking:
            attention = TakingAttention
        relative = self.content_scores
        return attention(
            project=self.build_projection(make, d_memory),
            q_norm=self._build_norm(make, self.n_heads),
            k_norm=None if taking else self._build_norm(make, self.kv_heads),
            v_norm=make(self.value_norm, width) if self.value_norm else None,
            rotate=self.rotary.build_rotation(self) if self.rotary else None,
            q_norm_rotated=make(rotated, width) if rotated else None,
            k_norm_rotated=make(rotated, width) if rotated and not taking else None,
            relative_project=relative.build_projection(self) if relative else None,
            relative=relative.build_scores(self, self.score_scale) if relative else None,
            core=self.build_core(make, causal=causal),
            gate=HeadGate(self.d_model, self.n_heads, gate.factors_of(width), make(gate.activation)) if gate else None,
            inner_norm=make(self.inner_norm, self.n_heads * width) if self.inner_norm else None,
            output=Linear(self.n_heads * width, self.d_model, bias=self.biases.o, residual=True),
            wires=self.gives or self.takes,
        )

    def _build_norm(self, make: Make, heads: int) -> nn.Module | None:
        """Build the norm of queries or keys, with separate weights for each of `heads` if the config requires it."""
        if self.qk_norm is None:
            return None
        if self.qk_norm_weight == "per_head":
            return make(self.qk_norm, self.head_width, heads)
        return make(self.qk_norm, self.head_width)


def _wires(name: str | None) -> tuple[str, ...]:
    """Return the names of the wires with keys and with values."""
    return () if name is None else (f"{name}.keys", f"{name}.values")


class SeparateHeadsConfig(MultiHeadConfig):
    """Every head has its own keys and values."""

    kind: Literal["mha"] = "mha"


class GroupedQueryConfig(MultiHeadConfig):
    """Groups of query heads share one head of keys and values."""

    kind: Literal["gqa"] = "gqa"
    n_kv_heads: Count
    """Number of key-value heads."""

    def check(self) -> None:
        super().check()
        if self.n_heads % self.n_kv_heads:
            raise Invalid(
                "n_kv_heads",
                f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})",
                notes=[f"divisors of {self.n_heads}: {divisors(self.n_heads)}"],
            )

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads


class MultiQueryConfig(MultiHeadConfig):
    """All query heads share one head of keys and values."""

    kind: Literal["mqa"] = "mqa"

    @property
    def kv_heads(self) -> int:
        return 1

"""A short causal convolution between two gates, as a mixer, and in front of an attention.

https://arxiv.org/abs/2511.23404. b batch, t positions, d channels.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.nn import order_tokens, restore_order


class GatedConvConfig(tfkit.MixerConfig):
    """A short causal convolution between two gates."""

    kind: Literal["gated_conv"] = "gated_conv"
    size: tfkit.Count = 3
    """Number of positions that the convolution covers."""

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        return (tfkit.State(1, self.size - 1, self.d_model),)

    def build(self, make: tfkit.Make) -> nn.Module:
        return GatedConv(self.d_model, self.size)


class GatedConv(nn.Module):
    """x [b, t, d_model] -> [b, t, d_model]."""

    def __init__(self, d_model: int, size: int) -> None:
        super().__init__()
        self.input = tfkit.Linear(d_model, {"before": d_model, "after": d_model, "x": d_model}, bias=True)
        self.conv = CausalConv(d_model, size)
        self.output = tfkit.Linear(d_model, d_model, bias=True, residual=True)

    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        before, after, x = self.input(x).chunk(3, dim=-1)
        return self.output(after * self.conv(before * x, context, 0))


class CausalConv(nn.Module):
    """x [b, t, d] -> [b, t, d]: each channel of a position and of the `size - 1` positions before it.

    The state `index` of the cache has the last `size - 1` positions, [b, 1, size - 1, d].
    """

    def __init__(self, d_model: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model, size))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.size(1) ** -0.5)

    def forward(self, x: Tensor, context: tfkit.Context, index: int) -> Tensor:
        n_before, cache, padding = self.weight.size(1) - 1, context.cache, context.padding
        if cache is None:
            x = F.pad(x, [0, 0, n_before, 0])
        else:
            state = cache.tensors[index][:, 0]
            x = torch.cat((state, x), dim=1)
            if padding is None:
                state.copy_(x[:, x.size(1) - n_before :])
            else:
                last = padding.sum(dim=1)[:, None] + torch.arange(n_before, device=x.device)
                state.copy_(x.gather(1, last[:, :, None].expand(-1, -1, x.size(2))))
        return F.conv1d(x.mT, self.weight[:, None], groups=x.size(2)).mT


class ConvAttentionConfig(tfkit.MultiHeadConfig):
    """Attention to the sum of a position and a short convolution."""

    kind: Literal["conv_attention"] = "conv_attention"  # type: ignore[assignment]
    size: tfkit.Count = 3
    """Number of positions that the convolution covers."""

    @property
    def cached(self) -> tuple[tfkit.Cached | tfkit.State, ...]:
        return (*super().cached, tfkit.State(1, self.size - 1, self.d_model))

    def build(self, make: tfkit.Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        attention = super().build(make, d_memory=d_memory, causal=causal)
        return ConvAttention(attention, CausalConv(self.d_model, self.size))


class ConvAttention(nn.Module):
    """x [b, t, d_model] -> [b, t, d_model]."""

    def __init__(self, attention: nn.Module, conv: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.conv = conv

    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        y = restore_order(self.conv(order_tokens(x, context), context, 2), context)
        return self.attention(x + y, context)


class DecayConfig(tfkit.MixerConfig):
    """A sum over all earlier positions that decays with distance, at a learned rate for each channel."""

    kind: Literal["decay"] = "decay"

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        return (tfkit.State(1, 1, self.d_model, wide=True),)

    def build(self, make: tfkit.Make) -> nn.Module:
        return Decay(self.d_model)


class Decay(nn.Module):
    """x [b, t, d_model] -> [b, t, d_model]; h_t = a h_(t-1) + (1 - a) x_t."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.input = tfkit.Linear(d_model, d_model, bias=True)
        self.rate_log = nn.Parameter(torch.empty(d_model))
        self.output = tfkit.Linear(d_model, d_model, bias=True, residual=True)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.rate_log, -2.0, 0.0)

    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        dtype, cache, padding = x.dtype, context.cache, context.padding
        wide = torch.promote_types(dtype, torch.float32)
        rate, n = self.rate_log.to(wide).exp(), torch.arange(x.size(1), device=x.device)
        distance = n[:, None] - n
        factors = torch.exp(-rate * distance.clamp(min=0)[:, :, None]) * (distance >= 0)[:, :, None]
        y = torch.einsum("q k d, b k d -> b q d", factors, self.input(x).to(wide) * -torch.expm1(-rate))
        if cache is not None:
            state = cache.tensors[0][:, 0]
            y = y + torch.exp(-rate * (n[:, None] + 1)) * state
            if padding is None:
                state.copy_(y[:, -1:])
            else:
                count = padding.sum(dim=1)[:, None, None].expand(-1, -1, y.size(2))
                state.copy_(torch.cat((state, y), dim=1).gather(1, count))
        return self.output(y.to(dtype))


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(GatedConvConfig)
    register(ConvAttentionConfig)
    register(DecayConfig)

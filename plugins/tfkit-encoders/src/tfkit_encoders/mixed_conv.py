"""The attention of ConvBERT, https://arxiv.org/abs/2008.02496, with as many heads of a dynamic convolution.

    q, k, v, u = project(x)
    attended_t = sum_s softmax(scale q_t k_s') v_s
    kernel_t   = softmax(kernels(q_t * pointwise(depthwise(x))_t))    n weights for each head
    convolved_t = sum_j kernel_t[j] u_(t + j - n // 2)
    output(attended, convolved)

A convolution covers the tokens around each token, without padding between them, and ends with the row or the document.

b batch, t positions, h heads, d width of a head, m d_model, n conv_size, i and o inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.nn import Context, Linear, Rearrange, Softmax, named, order_tokens, restore_order, rotary_of


class MixedConvConfig(tfkit.AttentionConfig):
    """Heads of attention, and as many heads of a convolution whose weights depend on the tokens around a query."""

    kind: Literal["mixed_conv"] = "mixed_conv"
    derived = MappingProxyType({"d_head": "d_model // (2 * n_heads)"})
    takes_memory = False
    causal = False
    reads_neighbors = True
    restarts = True

    conv_size: tfkit.Count = 9
    """Number of tokens that the convolution covers, with the query in the middle."""
    bias: tfkit.Shared[bool] = True
    """If true, all linear layers have biases."""

    def check(self) -> None:
        """Raise `Invalid` for heads that do not divide the width, an even size, and a mask without the neighbors."""
        if self.d_head is None and self.d_model % (2 * self.n_heads):
            message = f"d_model ({self.d_model}) must be a multiple of 2 * n_heads ({2 * self.n_heads})"
            notes = [f"divisors of {self.d_model}: {tfkit.divisors(self.d_model)}"]
            help = "set d_head to make the width of a head independent of d_model"
            raise tfkit.Invalid("n_heads", message, notes=notes, help=help)
        super().check()
        if self.conv_size % 2 == 0:
            message = f"conv_size must be odd, because the query is in the middle; got {self.conv_size}"
            raise tfkit.Invalid("conv_size", message)
        mask, side = self.mask, self.conv_size // 2
        if mask is not None and mask.rule is not None:
            raise tfkit.Invalid("mask.rule", "a mask rule could hide tokens that the convolution covers; got a rule")
        for name, extent in (("left", mask.left), ("right", mask.right)) if mask is not None else ():
            if extent is not None and extent < side:
                message = f"`{name}` must be at least conv_size // 2 ({side}), as the convolution covers; got {extent}"
                raise tfkit.Invalid(f"mask.{name}", message)

    @property
    def head_width(self) -> int:
        """Width of one head: half of the heads of the output are heads of the convolution."""
        return self.d_head or self.d_model // (2 * self.n_heads)

    @property
    def score_scale(self) -> float:
        return self.head_width**-0.5

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        return self.softmax_values("softmax")

    def build(self, make: tfkit.Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        rotate = None if self.rotary is None else self.rotary.build_rotation(self)
        return MixedConv(self, rotate=rotate, eager=make.attention_backend == "eager")


class MixedConv(nn.Module):
    """[b, t, m] -> [b, t, m]. The input of the output projection has the heads of attention first."""

    def __init__(self, config: MixedConvConfig, *, rotate: nn.Module | None, eager: bool) -> None:
        super().__init__()
        width, bias = config.n_heads * config.head_width, config.bias
        self.project = Linear(config.d_model, {"q": width, "k": width, "v": width, "conv": width}, bias=bias)
        self.depthwise = nn.Parameter(torch.empty(config.d_model, 1, config.conv_size))
        self.pointwise = Linear(config.d_model, width, bias=bias)
        self.kernels = Linear(width, config.n_heads * config.conv_size, bias=bias)
        self.rotate = rotate
        self.softmax = Softmax()
        self.output = Linear(2 * width, config.d_model, bias=bias, residual=True)
        self.split_heads = Rearrange("b t (h d) -> b h t d", h=config.n_heads)
        self.merge_heads = Rearrange("b h t d -> b t (h d)")
        self.split_kernels = Rearrange("b t (h n) -> b t h 1 n", h=config.n_heads)
        self.split_values = Rearrange("b t (h d) -> b t h d", h=config.n_heads)
        self.merge_values = Rearrange("b t h d -> b t (h d)")
        self.size = config.conv_size
        self.scale = config.score_scale
        self.dropout = config.dropout
        self.eager = eager

    def reset_parameters(self) -> None:
        """Fill the depthwise convolution as `nn.Conv1d` does."""
        bound = self.size**-0.5
        nn.init.uniform_(self.depthwise, -bound, bound)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v, values = self.project(x).chunk(4, dim=2)
        attended = self.attend(q, k, v, context)
        convolved = self.convolve(x, q, values, context)
        return self.output(torch.cat((attended, convolved), dim=2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Compute the heads of attention, [b, t, (h d)] each -> [b, t, (h d)]."""
        q, k, v, mask = self.split_heads(q), self.split_heads(k), self.split_heads(v), context.mask
        if self.rotate is not None:
            q, k = self.rotate(q, rotary_of(context)), self.rotate(k, rotary_of(context))
        if self.eager:
            weights = self.softmax(q @ k.mT * self.scale, mask)
            return self.merge_heads(F.dropout(weights, self.dropout, self.training) @ v)
        dropout = self.dropout if self.training else 0.0
        return self.merge_heads(F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=self.scale))

    def convolve(self, x: Tensor, q: Tensor, values: Tensor, context: Context) -> Tensor:
        """Compute the heads of the convolution, of x [b, t, m], queries and values [b, t, (h d)] -> [b, t, (h d)]."""
        x, q, values = order_tokens(x, context), order_tokens(q, context), order_tokens(values, context)
        near = self.neighbors(context)
        spans = self.pointwise(convolved(x[:, :, None], self.depthwise[:, 0], near)[:, :, 0])
        kernels = torch.softmax(self.split_kernels(self.kernels(q * spans)), dim=4)
        return restore_order(self.merge_values(convolved(self.split_values(values), kernels, near)), context)

    def neighbors(self, context: Context) -> Tensor | None:
        """Return where a token has a neighbor in its document, bool [b, t, n]; None without padding and documents."""
        padding, documents, side = context.padding, context.documents, self.size // 2
        if padding is None:
            return None
        numbers = padding.long() if documents is None else (documents.long() + 1) * padding
        around = F.pad(numbers, [side, side], value=-1.0).unfold(1, self.size, 1)
        return (around == numbers[:, :, None]) & padding[:, :, None]

    def extra_repr(self) -> str:
        return named(f"scale={self.scale:.6g}", conv_size=self.size, dropout=self.dropout)


def convolved(x: Tensor, weights: Tensor, near: Tensor | None) -> Tensor:
    """Sum the neighbors of each position of x [b, t, h, d], times their weights -> [b, t, h, d].

    Args:
        x: the values.
        weights: [..., n], for the positions from t - n // 2 to t + n // 2; the other axes are broadcast to x.
        near: True at neighbors that count, bool [b, t, n]; None for all positions of x.
    """
    size, length = weights.size(-1), x.size(1)
    y = torch.zeros_like(x)
    x = F.pad(x, [0, 0, 0, 0, size // 2, size // 2])
    for tap in range(size):
        weight = weights[..., tap]
        if near is not None:
            weight = weight * near[:, :, tap, None, None]
        y = torch.addcmul(y, x[:, tap : tap + length], weight)
    return y

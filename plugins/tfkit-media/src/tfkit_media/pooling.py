"""Pooling of a sequence to a vector, as in models of images.

Attention pooling, as in SigLIP: https://arxiv.org/abs/2106.04560. Class token and patches: https://arxiv.org/abs/2304.07193.

b batch, t positions, m width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit import Invalid
from tfkit.nn import Context
from tfkit_media.patches import Tokens


class TokenPoolConfig(tfkit.BlockConfig):
    """The mean of the patches; the class token and this mean, concatenated; or the mean of two class tokens."""

    block: Literal["token_pool"] = "token_pool"
    input: tfkit.Wire | None = None
    """The sequence to read."""
    registers: tfkit.Extent = 0
    """Number of register tokens between the class token and the patches."""
    select: Literal["patches", "class_and_patches", "class_tokens"] = "class_and_patches"
    """The mean of the patches, the class token and this mean, or the mean of the class and the distillation token."""

    def check(self) -> None:
        """Raise `Invalid` for register tokens between class tokens and patches that are not selected."""
        super().check()
        if self.registers and self.select == "class_tokens":
            raise Invalid("registers", "`registers` has no effect: the class tokens come first", help="remove it")

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        sequence = tfkit.expect(inputs, "input", "sequence")
        if sequence.mask is not None:
            raise Invalid("input", "`input` cannot have padding, as the mean would include it; read an image")
        if self.select == "class_tokens" and sequence.length == 1:
            raise Invalid(
                "select", "`class_tokens` needs an input with a class and a distillation token; got 1 position"
            )
        if sequence.length is not None and sequence.length <= 1 + self.registers:
            message = f"`registers` must leave patches among {sequence.length} positions; got {self.registers}"
            raise Invalid("registers", message)
        return tfkit.Signal("vector", (sequence.width or 0) * (2 if self.select == "class_and_patches" else 1))

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        pooled = slice(2) if self.select == "class_tokens" else slice(1 + self.registers, None)
        return TokenPool(pooled, joins=self.select == "class_and_patches")


class TokenPool(nn.Module):
    """[b, t, m] -> [b, m], or [b, 2 m] with the class token."""

    def __init__(self, pooled: slice, *, joins: bool) -> None:
        super().__init__()
        self.start: int = pooled.start or 0
        self.stop: int | None = pooled.stop
        self.joins = joins

    def forward(self, x: Tensor) -> Tensor:
        mean = x[:, self.start : self.stop].mean(dim=1)
        if self.joins:
            return torch.cat((x[:, 0], mean), dim=1)
        return mean


class EndPoolConfig(tfkit.BlockConfig):
    """The vector at the first end of a text: at a token, or at the token with the largest id.

    In a text without an end, it is the vector at the last token. Padding never counts.
    """

    block: Literal["end_pool"] = "end_pool"
    input: tfkit.MaskedWire | None = None
    """The sequence to read."""
    tokens: tfkit.Wire
    """The tokens of this sequence."""
    end: tfkit.Extent | None = None
    """The id of the token at the end; by default, the largest id of each text."""

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        sequence = tfkit.expect(inputs, "input", "sequence")
        tfkit.expect(inputs, "tokens", "tokens")
        return tfkit.Signal("vector", sequence.width)

    def ends(self) -> dict[str, int]:
        return {} if self.end is None else {"tokens": self.end}

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        return EndPool(self.end)


class EndPool(nn.Module):
    """[b, t, m] and tokens [b, t] -> [b, m]."""

    def __init__(self, end: int | None) -> None:
        super().__init__()
        self.end = end

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            tokens = tokens.masked_fill(~mask.to(torch.bool), -1)
        indices = tokens.argmax(dim=1)
        if self.end is not None:
            ends = tokens == self.end
            last = (tokens >= 0).int().cumsum(dim=1).argmax(dim=1)
            indices = torch.where(ends.any(dim=1), ends.int().argmax(dim=1), last)
        return x[torch.arange(x.size(0), device=x.device), indices]


class AttentionPoolConfig(tfkit.BlockConfig):
    """A learned query attends to a sequence; an FFN with a residual follows, as in SigLIP."""

    block: Literal["attention_pool"] = "attention_pool"
    input: tfkit.MaskedWire | None = None
    """The sequence to read."""
    d_model: tfkit.Shared[tfkit.Dim]
    """Width of the sequence."""
    attention: tfkit.AttentionConfig
    """Attention of the query to the sequence."""
    ffn: tfkit.FFNConfig
    """The feed-forward network."""
    norm: tfkit.Shared[tfkit.NormConfig] = tfkit.slot("layernorm")
    """Norm before the feed-forward network."""

    def check(self) -> None:
        """Raise `Invalid` for positions and masks, which a single query cannot have."""
        super().check()
        for name, reason in self.attention.self_attention_only.items():
            if getattr(self.attention, name) is not None:
                raise Invalid(f"attention.{name}", reason)

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        tfkit.expect(inputs, "input", "sequence", width=self.d_model)
        return tfkit.Signal("vector", self.d_model)

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        attention = make(self.attention, d_memory=self.d_model, causal=False)
        return AttentionPool(self.d_model, attention, make(self.norm, self.d_model), make(self.ffn))


class AttentionPool(nn.Module):
    """[b, t, m] -> [b, m]."""

    def __init__(self, width: int, attention: nn.Module, norm: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.query = Tokens(1, width)
        self.attention = attention
        self.norm = norm
        self.ffn = ffn

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        visible = None if mask is None else mask[:, None, None].to(torch.bool)
        y = self.attention(self.query(x), Context(visible, None, x))
        return (y + self.ffn(self.norm(y)))[:, 0]

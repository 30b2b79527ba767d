"""The mixer of FNet, https://arxiv.org/abs/2105.03824: a Fourier transform over positions and channels.

    y = Re(F_t x F_m),  where F_n[j, k] = exp(-2 pi i j k / n)

A transform has the length of its sequence: each row, and each document of a row, is transformed without padding.

b batch, t positions, m d_model.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit.nn import Context


class FourierConfig(tfkit.MixerConfig):
    """The real part of the Fourier transform over positions and channels, without parameters."""

    kind: Literal["fourier"] = "fourier"
    causal = False
    restarts = True

    def build(self, make: tfkit.Make) -> nn.Module:
        return Fourier()


class Fourier(nn.Module):
    """[b, t, m] -> [b, t, m]."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        padding = context.padding
        wide = x if x.dtype == torch.float64 else x.float()
        if padding is None:
            return torch.real(torch.fft.fft2(wide)).to(x.dtype)
        cosine, sine = fourier_tables(padding, context.documents, wide.dtype)
        wide = torch.fft.fft(wide)
        return (cosine @ torch.real(wide) + sine @ torch.imag(wide)).to(x.dtype)


def fourier_tables(padding: Tensor, documents: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of 2 pi j k / n, [b, t, t] each, for the positions j and k of a document of n tokens.

    They are 0 for tokens of different documents, and at padding.

    Args:
        padding: bool [b, t], True at tokens.
        documents: the document of each position [b, t]; None if each row is a document.
        dtype: of the tables.
    """
    same = padding[:, :, None] & padding[:, None, :]
    if documents is not None:
        same = same & (documents[:, :, None] == documents[:, None, :])
    count = same.sum(dim=2).clamp(min=1)
    position = same.tril().sum(dim=2) - 1
    # Whole turns are removed while the numbers are integers: a large angle would be rounded.
    turns = torch.remainder(position[:, :, None] * position[:, None, :], count[:, :, None]).to(dtype)
    angle = turns * (2 * math.pi / count.to(dtype))[:, :, None]
    return torch.cos(angle) * same, torch.sin(angle) * same

"""Rotary positions: queries and keys are turned by an angle that grows with the position.

The stack makes the table of cosines and sines once per forward; each layer's attention only has the rotation.
Every rotation is x * cos + swap(x) * sin: `swap` exchanges the two members of each pair, and the sign of the rotation
is in the table.

b batch, h heads, t positions, i pairs of channels, j the two of a pair.

RoPE: https://arxiv.org/abs/2104.09864. Partial: https://arxiv.org/abs/2204.06745.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.component import (
    AttentionConfig,
    Dim,
    Extent,
    Make,
    PositiveFloat,
    RopeScalingConfig,
    RotaryConfig,
)
from tfkit.components.rope_scaling import Frequencies
from tfkit.errors import Invalid
from tfkit.nn import Rearrange, settings


class RopeConfig(RotaryConfig):
    """Pairs of channels are rotated by position * theta ** (-2 i / width)."""

    kind: Literal["rope"] = "rope"
    theta: PositiveFloat = 10000.0
    """Base of the geometric series of frequencies."""
    width: Dim | None = None
    """Number of first channels of each head to rotate; by default all."""
    style: Literal["half", "interleaved"] = "half"
    """Channels of a pair: i and i + width / 2 (`half`), or 2 i and 2 i + 1 (`interleaved`)."""
    reverse: bool = False
    """If true, rotate in the opposite direction: by minus the angle."""
    scaling: RopeScalingConfig | None = None
    """Scaling of the frequencies to longer contexts."""
    sections: tuple[Extent, ...] | None = None
    """Number of pairs that each axis of the positions rotates, such as [16, 24, 24] for time, row and column in M-RoPE;
    together `width` / 2."""
    interleaved: bool = False
    """If true, the axes of `sections` take turns. The first axis rotates all pairs that remain, as in Qwen3-VL."""

    def check_attention(self, attention: AttentionConfig) -> None:
        d_head = attention.head_width
        if self.width is None and d_head % 2:
            raise Invalid(
                "position", f"the width of a head must be even, because rope rotates pairs of channels; got {d_head}"
            )
        if self.width is not None and (self.width > d_head or self.width % 2):
            raise Invalid(
                "position.width",
                f"width ({self.width}) must be even and at most the width of a head ({d_head})",
            )
        if self.scaling is not None:
            self.scaling.check_rope(self._width(attention), self.theta)
        pairs, sections = self._width(attention) // 2, self.sections
        if sections is None and self.interleaved:
            raise Invalid("position.interleaved", "`interleaved` has no effect without `sections`", help="remove it")
        if sections is not None and sum(sections) != pairs:
            raise Invalid(
                "position.sections", f"sections must add up to {pairs}, the pairs of a head; got {sum(sections)}"
            )

    @property
    def axes(self) -> int | None:
        return None if self.sections is None else len(self.sections)

    def _axis_of_pair(self) -> list[int]:
        """Return the axis of the positions that rotates each pair; empty if positions have a single axis."""
        sections = self.sections or ()
        if not self.interleaved:
            return [axis for axis, size in enumerate(sections) for _ in range(size)]
        n = len(sections)
        return [i % n if i < n * sections[i % n] else 0 for i in range(sum(sections))]

    def _width(self, attention: AttentionConfig) -> int:
        return self.width or attention.head_width

    def build(self, make: Make, attention: AttentionConfig) -> nn.Module:
        width = self._width(attention)
        scaling = self.scaling
        frequencies = make(scaling, width, self.theta) if scaling else Frequencies(width, self.theta)
        factor = scaling.attention_factor if scaling else 1.0
        axes = None if self.sections is None else PairPositions(self._axis_of_pair())
        return RotaryTable(frequencies, factor, -factor if self.reverse else factor, self.style, axes)

    def build_rotation(self, attention: AttentionConfig) -> nn.Module:
        width = self._width(attention)
        rotation = RotateHalf() if self.style == "half" else RotateInterleaved()
        return rotation if width == attention.head_width else RotatePart(rotation, width)


class RotaryTable(nn.Module):
    """Positions [b or 1, t] -> cosines and signed sines [2, b or 1, 1, t, width], float32.

    With `axes`, the positions may also be [b, t, n].
    """

    extra_repr = settings

    def __init__(
        self, frequencies: nn.Module, cos_factor: float, sin_factor: float, style: str, axes: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.axes = axes
        self.cos_factor = cos_factor
        self.sin_factor = sin_factor
        self.merge_pairs = Rearrange("b h t i j -> b h t (i j)") if style == "interleaved" else None

    def forward(self, positions: Tensor, n_keys: int) -> Tensor:
        of_pairs = positions[:, None, :, None] if self.axes is None else self.axes(positions)
        angles = of_pairs.float() * self.frequencies(n_keys, positions.device)
        cos, sin = angles.cos() * self.cos_factor, angles.sin() * self.sin_factor
        if self.merge_pairs is not None:
            cos = self.merge_pairs(torch.stack((cos, cos), dim=-1))
            sin = self.merge_pairs(torch.stack((-sin, sin), dim=-1))
        else:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return torch.stack((cos, sin))


class PairPositions(nn.Module):
    """Positions [b, t, n] -> the position of each pair, [b, 1, t, i]; positions [b, t] are equal on all axes."""

    extra_repr = settings

    def __init__(self, axis_of_pair: list[int]) -> None:
        super().__init__()
        self.axis_of_pair = axis_of_pair

    def forward(self, positions: Tensor) -> Tensor:
        if positions.dim() == 2:
            return positions[:, None, :, None]
        axes = positions[:, None].unbind(-1)  # an index would be copied to the device in each forward
        return torch.stack([axes[axis] for axis in self.axis_of_pair], dim=-1)


class RotateHalf(nn.Module):
    """Rotation of pairs of the first and the second half of the channels."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.addcmul(x * table[0], torch.cat((second, first), dim=-1), table[1])


class RotateInterleaved(nn.Module):
    """Rotation of pairs of an even channel and the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.split_pairs = Rearrange("b h t (i j) -> b h t i j", j=2)
        self.merge_pairs = Rearrange("b h t i j -> b h t (i j)")

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        swapped = self.merge_pairs(self.split_pairs(x).flip(-1))
        return torch.addcmul(x * table[0], swapped, table[1])


class RotatePart(nn.Module):
    """Rotation of the first `width` channels; the others are unchanged."""

    extra_repr = settings

    def __init__(self, rotation: nn.Module, width: int) -> None:
        super().__init__()
        self.rotation = rotation
        self.width = width

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return torch.cat((self.rotation(x[..., : self.width], table), x[..., self.width :]), dim=-1)

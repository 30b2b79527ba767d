"""The frequencies of rotary positions, and their scaling to contexts longer than the training's.

Linear scaling: https://arxiv.org/abs/2306.15595. YaRN, NTK and dynamic: https://arxiv.org/abs/2309.00071.
Llama 3 scaling: https://arxiv.org/abs/2407.21783, section 3.4.1. LongRoPE: https://arxiv.org/abs/2402.13753.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.component import Dim, Make, PositiveFloat, RopeScalingConfig
from tfkit.errors import Invalid
from tfkit.nn import settings


class Frequencies(nn.Module):
    """The frequencies as trained; base class of the scalings."""

    extra_repr = settings

    def __init__(self, width: int, theta: float) -> None:
        super().__init__()
        self.width = width
        self.theta = theta

    def forward(self, n_keys: int, device: torch.device) -> Tensor:
        return self.unscaled(self.theta, device)

    def unscaled(self, theta: float, device: torch.device) -> Tensor:
        """Return the powers theta ** (-2 i / width) for i < width / 2; [width / 2] float32."""
        return 1.0 / theta ** (torch.arange(0, self.width, 2, device=device).float() / self.width)


class LinearScalingConfig(RopeScalingConfig):
    """Position interpolation: all frequencies divided by `factor`."""

    kind: Literal["linear"] = "linear"
    factor: PositiveFloat

    def build(self, make: Make, width: int, theta: float) -> nn.Module:
        return LinearScaling(width, theta, self)


class LinearScaling(Frequencies):
    """All frequencies divided by `factor`."""

    def __init__(self, width: int, theta: float, config: LinearScalingConfig) -> None:
        super().__init__(width, theta)
        self.factor = config.factor

    def forward(self, n_keys: int, device: torch.device) -> Tensor:
        return self.unscaled(self.theta, device) / self.factor


class NTKScalingConfig(RopeScalingConfig):
    """NTK-aware: theta grows until the slowest pair of channels turns `factor` times slower; the first stays."""

    kind: Literal["ntk"] = "ntk"
    factor: PositiveFloat

    def check_rope(self, width: int, theta: float) -> None:
        _check_several("ntk", width)

    def build(self, make: Make, width: int, theta: float) -> nn.Module:
        return Frequencies(width, theta * self.factor ** (width / (width - 2)))


class DynamicScalingConfig(RopeScalingConfig):
    """NTK-aware: theta grows with the length once it exceeds the trained length.

    The length is the batch's, padding included: beyond `original_max_len`, a sequence depends on the others'.
    """

    kind: Literal["dynamic"] = "dynamic"
    factor: PositiveFloat
    original_max_len: Dim
    """Sequence length in training."""

    def check_rope(self, width: int, theta: float) -> None:
        _check_several("dynamic", width)

    def build(self, make: Make, width: int, theta: float) -> nn.Module:
        return DynamicScaling(width, theta, self)


class DynamicScaling(Frequencies):
    """Frequencies of a theta that grows with the number of keys."""

    def __init__(self, width: int, theta: float, config: DynamicScalingConfig) -> None:
        super().__init__(width, theta)
        self.factor = config.factor
        self.original_max_len = config.original_max_len

    def forward(self, n_keys: int, device: torch.device) -> Tensor:
        stretch = self.factor * max(n_keys, self.original_max_len) / self.original_max_len - (self.factor - 1)
        theta = self.theta * stretch ** (self.width / (self.width - 2))
        return self.unscaled(theta, device)


def _check_several(kind: str, width: int) -> None:
    if width == 2:
        raise Invalid("position.width", f"{kind} scaling needs several frequencies, but a width of 2 has only one")


class ProportionalScalingConfig(RopeScalingConfig):
    """The first `width` channels of the series turn; the pairs after them keep their place and are not turned."""

    kind: Literal["proportional"] = "proportional"
    width: Dim
    """Number of channels that are turned, two for each pair."""

    def check_rope(self, width: int, theta: float) -> None:
        if self.width % 2 or self.width >= width:
            message = f"width ({self.width}) must be even and below the width that is rotated ({width})"
            raise Invalid("position.scaling.width", message)

    def build(self, make: Make, width: int, theta: float) -> nn.Module:
        return ProportionalScaling(width, theta, self)


class ProportionalScaling(Frequencies):
    """The frequencies of the first pairs, and zeros."""

    def __init__(self, width: int, theta: float, config: ProportionalScalingConfig) -> None:
        super().__init__(width, theta)
        self.turning = config.width

    def forward(self, n_keys: int, device: torch.device) -> Tensor:
        channels = torch.arange(0, self.width, 2, device=device)
        return self.unscaled(self.theta, device) * (channels < self.turning)


class Llama3ScalingConfig(RopeScalingConfig):
    """Long waves are stretched by `factor`, short ones left unchanged, those between blended."""

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    original_max_len: Dim
    """Sequence length in training."""
    low_freq_factor: PositiveFloat = 1.0
    """Bound of the long waves: those longer than original_max_len / low_freq_factor are stretched."""
    high_freq_factor: PositiveFloat = 4.0
    """Bound of the short waves: those shorter than original_max_len / high_freq_factor are left unchanged."""

    def check(self) -> None:
        super().check()
        if self.low_freq_factor >= self.high_freq_factor:
            raise Invalid(
                "low_freq_factor",
                f"low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor ({self.high_freq_factor})",
            )

    def build(self, make: Make, width: int, theta: float) -> nn.Module:
        return Llama3Scaling(width, theta, self)


class Llama3Scaling(Frequencies):
    """Frequencies stretched according to the length of their waves."""

    def __init__(self, width: int, theta: float, config: Llama3ScalingConfig) -> None:
        super().__init__(width, theta)
        self.factor = config.factor
        self.original_max_len = config.original_max_len
        self.low = config.low_freq_factor
        self.high = config.high_freq_factor

    def forward(self, n_keys: int, device: torch.device) -> Tensor:
        frequencies = self.unscaled(self.theta, device)
        waves = self.original_max_len * frequencies / (2 * math.pi)
        share = ((waves - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (share + (1 - share) / self.factor)


class YarnScalingConfig(RopeScalingConfig):
    """Stretch pairs with fewer turns than `beta_slow`, but none with more than `beta_fast`; sharpen attention."""

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_max_len: Dim
    """Sequence length in training."""
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    temperature: PositiveFloat | None = None
    """Factor of cos and sin; (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1) unless given."""
    mscale: PositiveFloat | None = None
    """Growth of the temperature with `factor`; 1 unless given."""
    mscale_all_dim: PositiveFloat | None = None
    """Growth of the temperature's divisor; 0 unless given. DeepSeek's softmax scale contains that divisor squared."""
    truncate: bool = True
    """If true, round the ends of the ramp to whole channels."""

    @property
    def attention_factor(self) -> float:
        if self.temperature is not None:
            return self.temperature
        growth = 0.1 * max(math.log(self.factor), 0.0)
        return ((self.mscale or 1.0) * growth + 1.0) / ((self.mscale_all_dim or 0.0) * growth + 1.0)

    def check(self) -> None:
        super().check()
        for name in ("mscale", "mscale_all_dim"):
            if self.temperature is not None and getattr(self, name) is not None:
                raise Invalid(name, f"`{name}` has no effect: the temperature is set")
        if self.beta_slow > self.beta_fast:
            message = f"beta_slow ({self.beta_slow}) must be at most beta_fast ({self.beta_fast})"
            raise Invalid("beta_slow", message)

    def check_rope(self, width: int, theta: float) -> None:
        if theta == 1:
            raise Invalid("position.theta", "yarn needs frequencies that differ, but a theta of 1 makes them all equal")

    def build(self, make: Make, width: int, theta: float) -> nn.Module:
        return YarnScaling(width, theta, self)


class YarnScaling(Frequencies):
    """Frequencies stretched according to the number of their turns within the training length."""

    def __init__(self, width: int, theta: float, config: YarnScalingConfig) -> None:
        super().__init__(width, theta)
        self.factor = config.factor

        def channel(turns: float) -> float:
            """Return the pair of channels that turns this many times within the trained length."""
            return width * math.log(config.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = channel(config.beta_fast), channel(config.beta_slow)
        if config.truncate:
            low, high = math.floor(low), math.ceil(high)
        self.low = float(max(low, 0))
        high = float(min(high, width - 1))
        self.ramp = high - self.low if high != self.low else 0.001

    def forward(self, n_keys: int, device: torch.device) -> Tensor:
        frequencies = self.unscaled(self.theta, device)
        pairs = torch.arange(self.width // 2, device=device).float()
        stretched = ((pairs - self.low) / self.ramp).clamp(0, 1)
        return frequencies * (1 - stretched) + frequencies / self.factor * stretched

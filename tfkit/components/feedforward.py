"""The feed-forward network of a layer, plain and gated.

`mlp` and `glu` take any activation; the other kinds are these two with the activation of their name.
ReLU: https://arxiv.org/abs/1706.03762. GELU: https://arxiv.org/abs/1606.08415.
Squared ReLU: https://arxiv.org/abs/2109.08668. GLU, SwiGLU, GEGLU and ReGLU: https://arxiv.org/abs/2002.05202.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor, nn

from tfkit.component import (
    ActivationConfig,
    Changeable,
    Config,
    Dim,
    FFNConfig,
    Immaterial,
    InnerValue,
    Make,
    NormConfig,
    Probability,
    Shared,
)
from tfkit.components.activation import GELUConfig, QuickGELUConfig, ReLUConfig, SiLUConfig, SquaredReLUConfig
from tfkit.nn import Linear


class MLP(nn.Module):
    """down(norm(activation(up(x))))."""

    def __init__(self, config: DenseConfig, activation: nn.Module, inner_norm: nn.Module | None) -> None:
        super().__init__()
        self.up = Linear(config.d_model, config.d_ff, bias=config.biases.up)
        self.activation = activation
        self.inner_norm = inner_norm
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        self.down = Linear(config.d_ff, config.d_model, bias=config.biases.down, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.up(x))
        if self.inner_norm is not None:
            hidden = self.inner_norm(hidden)
        if self.dropout is not None:
            hidden = self.dropout(hidden)
        return self.down(hidden)


class GatedMLP(nn.Module):
    """down(norm(activation(gate(x)) * up(x)))."""

    def __init__(self, config: DenseConfig, activation: nn.Module, inner_norm: nn.Module | None) -> None:
        super().__init__()
        # One matrix, gate first.
        self.gate_up = Linear(config.d_model, {"gate": config.d_ff, "up": config.d_ff}, bias=config.biases.up)
        self.activation = activation
        self.inner_norm = inner_norm
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        self.down = Linear(config.d_ff, config.d_model, bias=config.biases.down, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        hidden = self.activation(gate) * up
        if self.inner_norm is not None:
            hidden = self.inner_norm(hidden)
        if self.dropout is not None:
            hidden = self.dropout(hidden)
        return self.down(hidden)


class DenseBiases(Config):
    """Biases of the individual linear layers."""

    up: bool = False
    """If true, the projections to the hidden layer have biases, the gate included."""
    down: bool = False
    """If true, the projection from the hidden layer has a bias."""


class DenseConfig(FFNConfig):
    """Fields of the plain and the gated kinds."""

    gated: ClassVar[bool] = False
    applied: ClassVar[type[ActivationConfig]]
    """The activation, for kinds that are named after an activation."""

    d_ff: Dim
    """Width of the hidden layer."""
    bias: Shared[bool] | DenseBiases = True
    """Biases of the linear layers: true for all, false for none, or a mapping of `up` and `down`."""
    inner_norm: NormConfig | None = None
    """Norm of the hidden layer."""
    dropout: Immaterial[Changeable[Probability]] = 0.0
    """Dropout on the hidden layer."""

    @property
    def biases(self) -> DenseBiases:
        """The biases of the linear layers as a mapping."""
        return DenseBiases(up=self.bias, down=self.bias) if isinstance(self.bias, bool) else self.bias

    @property
    def hidden_width(self) -> int:
        return self.d_ff

    @property
    def inner_values(self) -> Mapping[str, InnerValue]:
        """The hidden layer, as the last linear layer takes it."""
        replaced = type(self).build is not DenseConfig.build
        return {} if replaced else {"hidden": InnerValue("down", 0, f"[b, t, {self.d_ff}]")}

    def between(self) -> ActivationConfig:
        """Return the activation between the linear layers."""
        return self.applied()

    def build(self, make: Make) -> nn.Module:
        activation = make(self.between())
        norm = None if self.inner_norm is None else make(self.inner_norm, self.d_ff)
        return GatedMLP(self, activation, norm) if self.gated else MLP(self, activation, norm)


class MLPConfig(DenseConfig):
    """Two linear layers with any activation between them."""

    kind: Literal["mlp"] = "mlp"
    activation: ActivationConfig
    """Activation between the two linear layers."""

    def between(self) -> ActivationConfig:
        return self.activation


class GLUConfig(MLPConfig):
    """The hidden layer is gated: activation(gate(x)) * up(x)."""

    gated = True
    kind: Literal["glu"] = "glu"  # type: ignore[assignment]


class ReLUFFNConfig(DenseConfig):
    """Two linear layers with ReLU between them."""

    applied = ReLUConfig
    kind: Literal["relu"] = "relu"


class GELUFFNConfig(DenseConfig):
    """Two linear layers with GELU between them."""

    kind: Literal["gelu"] = "gelu"
    approximate: Literal["none", "tanh"] = "none"
    """`tanh` is the approximation used by GPT-2 and similar models."""

    def between(self) -> ActivationConfig:
        return GELUConfig(approximate=self.approximate)


class SiLUFFNConfig(DenseConfig):
    """Two linear layers with SiLU between them."""

    applied = SiLUConfig
    kind: Literal["silu"] = "silu"


class SquaredReLUFFNConfig(DenseConfig):
    """Two linear layers with squared ReLU between them."""

    applied = SquaredReLUConfig
    kind: Literal["relu2"] = "relu2"


class QuickGELUFFNConfig(DenseConfig):
    """Two linear layers with x sigmoid(1.702 x) between them."""

    applied = QuickGELUConfig
    kind: Literal["quick_gelu"] = "quick_gelu"


class SwiGLUConfig(SiLUFFNConfig):
    """Gated by SiLU, as in Llama."""

    gated = True
    kind: Literal["swiglu"] = "swiglu"  # type: ignore[assignment]


class GEGLUConfig(GELUFFNConfig):
    """Gated by GELU, as in T5 v1.1."""

    gated = True
    kind: Literal["geglu"] = "geglu"  # type: ignore[assignment]


class ReGLUConfig(ReLUFFNConfig):
    """Gated by ReLU."""

    gated = True
    kind: Literal["reglu"] = "reglu"  # type: ignore[assignment]

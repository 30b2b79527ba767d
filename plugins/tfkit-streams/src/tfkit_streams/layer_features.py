"""Features of each layer, as in Gemma 3n and 4: a small embedding of the token for each layer, which gates a sublayer.

    features = (norm(project(x) * d_model ** -0.5) + table) * 2 ** -0.5        block `layer_inputs`
    y = up(activation(down(x)) * features of the layer)                        mixer `feature_gate`
    x = (x + y) * scale                                                        residual `scaled_sum`

Gemma 4 in transformers: https://github.com/huggingface/transformers.
b batch, t positions, n layers, c features of a layer.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit.nn import Context, Linear, Rearrange, named


class LayerInputsConfig(tfkit.BlockConfig):
    """The features of all layers: the sum of a projected sequence, normalized for each layer, and of a table."""

    block: Literal["layer_inputs"] = "layer_inputs"
    inputs: tuple[tfkit.Wire, ...]
    """The sequence to project, and the embedding with the features of all layers."""
    d_features: tfkit.Shared[tfkit.Dim]
    """Number of features of a layer."""
    norm: tfkit.Shared[tfkit.NormConfig]
    """Norm of the projected features of each layer."""

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        signals: list[tfkit.Signal] = inputs["inputs"]
        if len(signals) != 2 or any(signal.type != "sequence" for signal in signals):
            raise tfkit.Invalid("inputs", "`inputs` must be two sequences: the one to project, and the table's")
        if (signals[1].width or 0) % self.d_features:
            message = f"`inputs.1` must have a multiple of d_features ({self.d_features}) as its width"
            raise tfkit.Invalid("inputs.1", f"{message}; got {signals[1].in_words()}")
        return signals[1]

    def decoding(self, inputs: tfkit.Signals) -> tfkit.Decoding:
        return tfkit.Decoding()

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        x, table = inputs["inputs"]
        return LayerInputs(self, x.width, table.width, make(self.norm, self.d_features))


class LayerInputs(nn.Module):
    """A sequence [b, t, d_model] and a table's [b, t, n * c] -> [b, t, n * c]."""

    def __init__(self, config: LayerInputsConfig, d_model: int, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.project = Linear(d_model, width, bias=False)
        self.norm = norm
        self.scale = d_model**-0.5
        self.split_layers = Rearrange("b t (n c) -> b t n c", c=config.d_features)
        self.join_layers = Rearrange("b t n c -> b t (n c)")

    def forward(self, inputs: list[Tensor]) -> Tensor:
        x, table = inputs[0], inputs[1]
        projected = self.norm(self.split_layers(self.project(x) * self.scale))
        return (self.join_layers(projected) + table) * 2.0**-0.5


class FeatureGateConfig(tfkit.MixerConfig):
    """A projection down, a product with the features of the layer, and a projection up, independently per position."""

    kind: Literal["feature_gate"] = "feature_gate"
    takes_features = True
    d_features: tfkit.Shared[tfkit.Dim]
    """Number of features of the layer."""
    activation: tfkit.ActivationConfig = tfkit.slot("gelu")
    """Activation before the product."""

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        return ()

    def build(self, make: tfkit.Make) -> nn.Module:
        return FeatureGate(self, make(self.activation))


class FeatureGate(nn.Module):
    """x [b, t, d_model], and features [b, t, c] in the context -> [b, t, d_model]."""

    def __init__(self, config: FeatureGateConfig, activation: nn.Module) -> None:
        super().__init__()
        self.gate = Linear(config.d_model, config.d_features, bias=False)
        self.activation = activation
        self.up = Linear(config.d_features, config.d_model, bias=False, residual=True)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        features = context.features
        assert features is not None
        return self.up(self.activation(self.gate(x)) * features)


class ScaledSumConfig(tfkit.StreamConfig):
    """The sum of x and a sublayer's output, times a learned number, initially 1."""

    kind: Literal["scaled_sum"] = "scaled_sum"
    reads = False

    def build(self, make: tfkit.Make, part: tfkit.StreamPart, width: int) -> nn.Module:
        return Read() if part == "read" else ScaledSum()


class Read(nn.Module):
    """x [b, t, m] unchanged."""

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, list[Tensor]]:
        nothing: list[Tensor] = []
        return x, nothing


class ScaledSum(nn.Module):
    """(x + y) * scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor, y: Tensor, state: list[Tensor]) -> Tensor:
        return (x + y) * self.scale

    def extra_repr(self) -> str:
        return named("scalar")

"""An FFN, a stack of layers without attention, in which every position is by itself, and a rule for a field."""

from typing import Literal

from torch import Tensor, nn

import tfkit


class MaxoutConfig(tfkit.FFNConfig):
    """Each hidden value is the larger of two. https://arxiv.org/abs/1302.4389"""

    kind: Literal["maxout"] = "maxout"
    d_ff: tfkit.Dim

    def build(self, make: tfkit.Make) -> nn.Module:
        return Maxout(self)


class Maxout(nn.Module):
    def __init__(self, config: MaxoutConfig) -> None:
        super().__init__()
        self.up = tfkit.Linear(config.d_model, 2 * config.d_ff, bias=False)
        self.split = tfkit.Rearrange("b t (p f) -> b t p f", p=2)
        self.down = tfkit.Linear(config.d_ff, config.d_model, bias=False, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.split(self.up(x)).amax(dim=2))


class TowerConfig(tfkit.BlockConfig):
    """Layers of x + ffn(norm(x))."""

    block: Literal["tower"] = "tower"
    input: tfkit.MaskedWire | None = None
    d_model: tfkit.Shared[tfkit.Dim]
    n_layers: tfkit.Count
    ffn: tfkit.FFNConfig
    norm: tfkit.Shared[tfkit.NormConfig] = tfkit.slot("layernorm")

    def output(self, inputs: tfkit.Signals) -> tfkit.Signal:
        return tfkit.expect(inputs, "input", "sequence", width=self.d_model)

    def stack(self) -> tfkit.Layers:
        layer = tfkit.Layer(self, (tfkit.Step("ffn", self.ffn, norm_in=self.norm),))
        return tfkit.Layers(layers=(layer,) * self.n_layers)

    def decoding(self, inputs: tfkit.Signals) -> tfkit.Decoding:
        return tfkit.Decoding()

    def build(self, make: tfkit.Make, inputs: tfkit.Signals) -> nn.Module:
        return Tower(self, make)


class Tower(nn.Module):
    def __init__(self, config: TowerConfig, make: tfkit.Make) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, make) for _ in range(config.n_layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self, config: TowerConfig, make: tfkit.Make) -> None:
        super().__init__()
        self.ffn_norm_in = make(config.norm, config.d_model)
        self.ffn = make(config.ffn)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.ffn_norm_in(x))


class DoubledConfig(tfkit.FieldConfig):
    """A field that is twice a value of the spec."""

    kind: Literal["doubled"] = "doubled"
    doubled: str
    """The path of the value."""

    def read(self, name: str, file: tfkit.Reading) -> None:
        file.put(self.doubled, file.value(name) // 2)

    def write(self, name: str, file: tfkit.Writing) -> None:
        file.put(name, 2 * file.value(self.doubled))

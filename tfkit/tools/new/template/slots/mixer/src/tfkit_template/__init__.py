"""A short causal convolution of gated inputs. https://arxiv.org/abs/2511.23404

b batch, t positions, d channels.
"""

from __future__ import annotations

from typing import Literal

import tfkit
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TemplateConfig(tfkit.MixerConfig):
    """output(gate * convolution(x))."""

    kind: Literal["template"] = "template"
    size: tfkit.Count = 3
    """Positions that the convolution covers."""
    bias: tfkit.Shared[bool] = True
    """If true, the linear layers have biases."""

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        return (tfkit.State(heads=1, rows=self.size - 1, width=self.d_model),)

    def build(self, make: tfkit.Make) -> nn.Module:
        return TemplateMixer(self)


class TemplateMixer(nn.Module):
    """[b, t, d_model] -> the same; the state has the last positions before the new ones, [b, 1, size - 1, d_model]."""

    def __init__(self, config: TemplateConfig) -> None:
        super().__init__()
        d_model = config.d_model
        self.input = tfkit.Linear(d_model, {"gate": d_model, "x": d_model}, bias=config.bias)
        self.weight = nn.Parameter(torch.empty(d_model, config.size))
        self.output = tfkit.Linear(d_model, d_model, bias=config.bias, residual=True)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.size(1) ** -0.5)

    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        gate, x = self.input(x).chunk(2, dim=-1)
        n_before, cache, padding = self.weight.size(1) - 1, context.cache, context.padding
        if cache is None:
            x = F.pad(x, [0, 0, n_before, 0])
        else:
            state = cache.tensors[0][:, 0]
            x = torch.cat((state, x), dim=1)
            if padding is None:
                state.copy_(x[:, x.size(1) - n_before :])
            else:
                last = padding.sum(dim=1)[:, None] + torch.arange(n_before, device=x.device)
                state.copy_(x.gather(1, last[:, :, None].expand(-1, -1, x.size(2))))
        return self.output(gate * F.conv1d(x.mT, self.weight[:, None], groups=x.size(2)).mT)


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(TemplateConfig)

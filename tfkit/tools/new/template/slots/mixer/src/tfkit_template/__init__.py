"""A short causal convolution between two gates. https://arxiv.org/abs/2511.23404

b batch, t positions, d channels.
"""

from __future__ import annotations

from typing import Literal

import tfkit
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TemplateConfig(tfkit.MixerConfig):
    """output(after * convolution(before * x)), where x and both gates are projections of the input."""

    kind: Literal["template"] = "template"
    size: tfkit.Count = 3
    """Number of positions that the convolution covers."""

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        return (tfkit.State(heads=1, rows=self.size - 1, width=self.d_model),)

    def build(self, make: tfkit.Make) -> nn.Module:
        return TemplateMixer(self.d_model, self.size)


class TemplateMixer(nn.Module):
    """x [b, t, d] -> [b, t, d]; the state contains the last positions before x, [b, 1, size - 1, d]."""

    def __init__(self, d_model: int, size: int) -> None:
        super().__init__()
        self.input = tfkit.Linear(d_model, {"before": d_model, "after": d_model, "x": d_model}, bias=False)
        self.weight = nn.Parameter(torch.empty(d_model, size))
        self.output = tfkit.Linear(d_model, d_model, bias=False, residual=True)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.size(1) ** -0.5)

    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        before, after, x = self.input(x).chunk(3, dim=-1)
        return self.output(after * self.convolve(before * x, context))

    def convolve(self, x: Tensor, context: tfkit.Context) -> Tensor:
        """Convolve [b, t, d] -> [b, t, d], and replace the state if there is a cache."""
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
        return F.conv1d(x.mT, self.weight[:, None], groups=x.size(2)).mT


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(TemplateConfig)

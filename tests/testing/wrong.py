"""Components with a single fault each."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

import tfkit


class Wrong(nn.Module):
    """Every promise kept, so that a subclass can break one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight


class LooksAhead(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.roll(-1, dims=1)) * self.weight


class LeaksItsGradient(Wrong):
    """The values of later tokens cancel, and their gradients do not."""

    def forward(self, x: Tensor) -> Tensor:
        later = x.roll(-1, dims=1)
        return (torch.tanh(x) + later - later.detach()) * self.weight


class CountsTheLength(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight * x.size(1)


class Unfilled(Wrong):
    def reset_parameters(self) -> None:
        pass


class HiddenState(Wrong):
    """A random direction that no state dict carries."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.direction = torch.rand(16).tolist()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight + torch.tensor(self.direction, dtype=x.dtype)


class Upcasts(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.float()) * self.weight.float()


class Unused(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class NaNGradient(Wrong):
    """The root of a square: finite, and without a gradient at zero."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0 * self.weight).square().sum(-1, keepdim=True).sqrt() + x


class DoesNotScript(Wrong):
    def forward(self, x: Tensor, **unused: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight


class DoesNotScriptInTheMiddle(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight / (1 + x.norm(dim=-1, keepdim=True))


class BreaksTheGraph(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        if bool(self.weight.sum() > 0):
            return torch.tanh(x) * self.weight
        return x


class Broadcasts(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x) * self.weight).mean(-1, keepdim=True)


class ChangesItsInput(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.weight)


class IsRandom(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(x) * self.weight, 0.5)


class LosesItsBuffer(Wrong):
    """A buffer that no state dict has, and that nothing fills once the model has memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(16.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight + self.steps


class KeepsATensor(Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.arange(16.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight + self.steps


class LooksBack(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.cumsum(1)) * self.weight


class MixesTheBatch(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x - x.mean(0, keepdim=True)) * self.weight


class Fails(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) @ self.weight[:3]


class TwoFaults(Upcasts):
    def __init__(self) -> None:
        super().__init__()
        self.spare, self.other = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.ones_(parameter)


def kinds_of(of: type[nn.Module]) -> dict[str, type[nn.Module]]:
    return {of.__name__: of} | {name: value for below in of.__subclasses__() for name, value in kinds_of(below).items()}


class FFNConfig(tfkit.FFNConfig):
    """Builds the module class that stands in `wrong`."""

    kind: Literal["wrong"] = "wrong"
    wrong: str

    def build(self, make: tfkit.Make) -> nn.Module:
        return kinds_of(Wrong)[self.wrong]()

"""Typical faults of a new plugin: attentions, FFNs and mixers with a single fault each."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit.nn import Linear, Softmax


class Core(nn.Module):
    """Softmax attention, written out, and right."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.softmax = Softmax()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.softmax(q @ k.mT * self.scale, mask) @ v


class IgnoresPadding(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.softmax(q @ k.mT * self.scale, None) @ v


class CountsPadding(Core):
    """It weighs each key by its column, as absolute positions do."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return super().forward(q, k * torch.arange(1.0, k.size(2) + 1, dtype=k.dtype)[:, None], v, mask)


class LooksAhead(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask = torch.cat((mask[..., :1], mask[..., :-1]), dim=-1)
        return self.softmax(q @ k.mT * self.scale, mask) @ v


class DiffersWithACache(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        recent = v if q.size(2) == k.size(2) else v * 0.9
        return self.softmax(q @ k.mT * self.scale, mask) @ recent


class WindowOneOff(Core):
    """It hides the farthest key that its window grants."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and mask.size(-2) > 1:
            farther = torch.cat((torch.full_like(mask[..., :1], -torch.inf), mask[..., :-1]), dim=-1)
            mask = torch.where(torch.eye(mask.size(-1)) > 0, mask, mask + farther.clamp(max=0))
        return self.softmax(q @ k.mT * self.scale, mask) @ v


class DoesNotScript(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.softmax(q @ k.mT * self.scale, mask) @ v / (1 + v.norm(dim=(1, 2, 3), keepdim=True))


class DependsOnItsNeighbours(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.softmax(q @ k.mT * self.scale, mask) @ (v - v.mean(dim=0, keepdim=True))


class ChangesItsInput(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q.data.mul_(self.scale)
        return self.softmax(q @ k.mT, mask) @ v


class AttentionOfANewcomer(tfkit.MultiHeadConfig):
    """Builds the core whose name stands in `core`."""

    kind: Literal["newcomer"] = "newcomer"  # type: ignore[assignment]
    core: str = "Core"

    def build_core(self, make: tfkit.Make, *, causal: bool) -> nn.Module:
        kinds = {core.__name__: core for core in (Core, *Core.__subclasses__())}
        return kinds[self.core](self.head_width**-0.5)


class IgnoresItsMemory(AttentionOfANewcomer):
    """Attends to x, also in cross-attention."""

    kind: Literal["ignores_memory"] = "ignores_memory"  # type: ignore[assignment]

    def build(self, make: tfkit.Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        module = super().build(make, d_memory=None, causal=causal)
        return module if d_memory is None else WithoutMemory(module)


class WithoutMemory(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        y: Tensor = self.attention(x, context._replace(memory=None, mask=None))
        return y


class WrongCount(AttentionOfANewcomer):
    """Declares one head less than its module caches."""

    kind: Literal["wrong_count"] = "wrong_count"  # type: ignore[assignment]

    @property
    def cached(self) -> tuple[tfkit.Cached, ...]:
        return (tfkit.Cached(self.n_heads - 1, self.head_width),) * 2


class LosesItsBias(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.linear = Linear(d_model, d_model, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            return torch.tanh(x @ self.linear.weight.mT)
        return torch.tanh(self.linear(x))


class DeadHalf(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.up, self.down = Linear(d_model, 16, bias=True), Linear(16, d_model, bias=True, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        return self.down(torch.cat((hidden[..., :8], torch.zeros_like(hidden[..., 8:])), dim=-1))


class FFNOfANewcomer(tfkit.FFNConfig):
    """Builds the FFN whose name stands in `ffn`."""

    kind: Literal["newcomer"] = "newcomer"
    ffn: Literal["LosesItsBias", "DeadHalf"]

    def build(self, make: tfkit.Make) -> nn.Module:
        return {"LosesItsBias": LosesItsBias, "DeadHalf": DeadHalf}[self.ffn](self.d_model)


class Decay(nn.Module):
    """A sum over earlier tokens that decays, in chunks; the state restarts with each document."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.input = Linear(d_model, d_model, bias=True)
        self.output = Linear(d_model, d_model, bias=True, residual=True)
        self.rate = nn.Parameter(torch.empty(d_model))
        self.chunk = 64

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.rate, 1.0, 3.0)

    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        write, dtype = self.input(x), x.dtype
        decay = torch.sigmoid(self.rate).expand_as(write)
        if context.documents is not None:
            decay = decay * self.continues(context.documents)[:, :, None]
        if context.padding is not None:
            tokens = context.padding[:, :, None]
            write, decay = write * tokens, torch.where(tokens, decay, 1.0)
        state = torch.zeros_like(write[:, 0]) if context.cache is None else context.cache.tensors[0][:, 0, 0].clone()
        outputs = []
        for writes, decays in zip(write.split(self.chunk, 1), decay.split(self.chunk, 1), strict=True):
            state = self.carried(state, len(outputs))
            for column in range(writes.size(1)):
                state = decays[:, column] * state + writes[:, column]
                outputs.append(state)
        if context.cache is not None:
            context.cache.tensors[0][:, 0, 0] = state
        return self.output(torch.stack(outputs, dim=1).to(dtype))

    def continues(self, documents: Tensor) -> Tensor:
        return torch.cat((documents[:, :1] < 0, documents[:, 1:] == documents[:, :-1]), dim=1)

    def carried(self, state: Tensor, position: int) -> Tensor:
        return state


class ForgetsAtChunks(Decay):
    def carried(self, state: Tensor, position: int) -> Tensor:
        return state if position == 0 else torch.zeros_like(state)


class MissesDocumentsAtChunks(Decay):
    def continues(self, documents: Tensor) -> Tensor:
        first = torch.arange(documents.size(1)) % self.chunk == 0
        return super().continues(documents) | first


class ForgetsAt64(Decay):
    """Its kernel has chunks of 64, whatever `chunk` is."""

    def carried(self, state: Tensor, position: int) -> Tensor:
        return torch.zeros_like(state) if position == 64 else state

    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        self.chunk = 64
        return super().forward(x, context)


class MixerOfANewcomer(tfkit.MixerConfig):
    """Builds the recurrence whose name stands in `mixer`."""

    kind: Literal["newcomer"] = "newcomer"
    free_length = False
    restarts = True
    chunk_attributes = ("chunk",)
    mixer: str = "Decay"

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        return (tfkit.State(1, 1, self.d_model),)

    def build(self, make: tfkit.Make) -> nn.Module:
        kinds = {mixer.__name__: mixer for mixer in (Decay, *Decay.__subclasses__())}
        return kinds[self.mixer](self.d_model)


class UndeclaredChunks(MixerOfANewcomer):
    """A mixer that does not declare its chunks."""

    kind: Literal["undeclared"] = "undeclared"  # type: ignore[assignment]
    chunk_attributes = ()
    mixer: str = "ForgetsAtChunks"


class MisspeltChunks(MixerOfANewcomer):
    """A mixer that declares an attribute that its module lacks."""

    kind: Literal["misspelt"] = "misspelt"  # type: ignore[assignment]
    chunk_attributes = ("inner.chunk",)

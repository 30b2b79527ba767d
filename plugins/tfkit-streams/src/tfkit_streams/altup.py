"""The layer of Gemma 3n: AltUp around the layer, LAuReL around its attention, and an FFN whose gates are mostly 0.

    AltUp: n streams, of which each layer computes the first one, x (https://arxiv.org/abs/2301.13310)
        r(x) = tanh(router(rmsnorm(x) / d_model))
        predictions = streams + predict(r(x)) @ streams;  the layer computes y from the first prediction
        streams = predictions + (1 + correct(r(y))) * (y - first prediction)
        streams 1 to n - 1 also get norm(up(activation(gate(scale * first stream)) * features of the layer))
    LAuReL: x = (x + y + normed + norm(right(left(normed)))) / sqrt(2), normed = norm(x), y the sublayer's output
        (https://arxiv.org/abs/2411.07501)
    FFN: down(activation(relu(g - mean(g) - c std(g))) * up(x)), g = gate(x), for a quantile c of normal numbers

Gemma 3n in transformers: https://github.com/huggingface/transformers.
b batch, t positions, l streams, m d_model, c features of a layer.
"""

from __future__ import annotations

from statistics import NormalDist
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.nn import Context, Linear, Rearrange, named
from tfkit_streams.precision import widened


class AltUpConfig(tfkit.StreamConfig):
    """Several streams around a layer, which computes the first stream; all others are predicted and corrected."""

    kind: Literal["altup"] = "altup"
    enters = True
    takes_features = True
    training_only = MappingProxyType({"clip": None})
    streams: tfkit.Count = 4
    """Number of streams."""
    d_features: tfkit.Shared[tfkit.Dim]
    """Number of features of a layer."""
    norm: tfkit.Shared[tfkit.NormConfig]
    """Norm of the gated features."""
    activation: tfkit.ActivationConfig = tfkit.slot("gelu")
    """Activation before the product with the features."""
    eps: tfkit.PositiveFloat = 1e-6
    """Epsilon of the norm before the router."""
    clip: tfkit.PositiveFloat | None = None
    """Bound of the weights of `predict` and `correct` in training."""

    def check(self) -> None:
        """Raise `Invalid` for a single stream, which would have nothing to predict."""
        super().check()
        if self.streams < 2:
            raise tfkit.Invalid("streams", f"`streams` must be at least 2; got {self.streams}")

    def build(self, make: tfkit.Make, part: tfkit.StreamPart, width: int) -> nn.Module:
        if part == "enter":
            return Enter(self.streams, width)
        if part == "leave":
            return Leave(self.streams, width)
        if part == "read":
            return Read(self, width)
        return Write(self, width, make(self.activation), make(self.norm, width))


class Enter(nn.Module):
    """x and its projections, with the magnitude of x: [b, t, m] -> [b, t, l, m]."""

    def __init__(self, streams: int, width: int) -> None:
        super().__init__()
        self.projections = nn.ModuleList(Linear(width, width, bias=False) for _ in range(streams - 1))

    def forward(self, x: Tensor) -> Tensor:
        streams = [x]
        for project in self.projections:
            streams.append(rescaled(project(x), x))  # noqa: PERF401  TorchScript has no `extend` of a generator
        return torch.stack(streams, dim=2)


class Leave(Enter):
    """The mean of the first stream and the projected streams, rescaled to the first: [b, t, l, m] -> [b, t, m]."""

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :, 0]
        streams = [first]
        for i, project in enumerate(self.projections, 1):
            streams.append(rescaled(project(x[:, :, i]), first))
        return torch.stack(streams).mean(dim=0)


def rescaled(x: Tensor, like: Tensor) -> Tensor:
    """Return x with the root mean square of `like` at each position."""
    rms = like.square().mean(dim=-1, keepdim=True).sqrt()
    return x * rms / x.square().mean(dim=-1, keepdim=True).clamp(min=1e-5).sqrt()


class Clipped(Linear):
    """A linear layer without bias whose weights are bounded in training."""

    def __init__(self, d_in: int, d_out: int, clip: float | None) -> None:
        super().__init__(d_in, d_out, bias=False)
        self.clip = clip

    def forward(self, x: Tensor) -> Tensor:
        weight, clip = self.weight, self.clip
        if clip is not None and self.training:
            weight = weight.clamp(-clip, clip)
        return F.linear(x, weight)


class Read(nn.Module):
    """The first prediction; for `Write`, all predictions, the features, and the weights of the router."""

    def __init__(self, config: AltUpConfig, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.router = Linear(width, config.streams, bias=False)
        self.predict = Clipped(config.streams, config.streams**2, config.clip)
        self.split_matrix = Rearrange("b t (l k) -> b t l k", l=config.streams)
        self.eps = config.eps

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, streams: Tensor, context: Context) -> tuple[Tensor, list[Tensor]]:
        features = context.features
        assert features is not None
        matrix = self.split_matrix(self.predict(routed(streams[:, :, 0], self.scale, self.router.weight, self.eps)))
        predictions = torch.matmul(matrix, streams) + streams
        return predictions[:, :, 0], [predictions, features, self.scale, self.router.weight]

    def extra_repr(self) -> str:
        return named(eps=self.eps)


class Write(nn.Module):
    """The corrected predictions, and gated features in all streams but the first: -> [b, t, l, m]."""

    def __init__(self, config: AltUpConfig, width: int, activation: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.correct = Clipped(config.streams, config.streams, config.clip)
        self.scale = nn.Parameter(torch.empty(width))
        self.gate = Linear(width, config.d_features, bias=False)
        self.activation = activation
        self.up = Linear(config.d_features, width, bias=False)
        self.norm = norm
        self.eps = config.eps

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, streams: Tensor, y: Tensor, state: list[Tensor]) -> Tensor:
        predictions, features, scale, weight = state[0], state[1], state[2], state[3]
        factors = self.correct(routed(y, scale, weight, self.eps)) + 1.0
        corrected = predictions + factors[..., None] * (y - predictions[:, :, 0])[:, :, None]
        first = corrected[:, :, 0]
        added = self.norm(self.up(self.activation(self.gate(first * self.scale)) * features))
        return torch.cat([first[:, :, None], corrected[:, :, 1:] + added[:, :, None]], dim=2)

    def extra_repr(self) -> str:
        return named(eps=self.eps)


def routed(x: Tensor, scale: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return tanh(router(rmsnorm(x) / d_model)): [b, t, m] -> [b, t, l]."""
    width = x.size(-1)
    normed = (F.rms_norm(widened(x), [width], eps=eps) * widened(scale)).to(x.dtype)
    return torch.tanh(widened(F.linear(normed * (1.0 / width), weight))).to(x.dtype)


class LaurelConfig(tfkit.StreamConfig):
    """The sum of x, the output, and normalized x after a residual of low rank, divided by the root of 2."""

    kind: Literal["laurel"] = "laurel"
    rank: tfkit.Dim
    """Width between the two matrices."""
    norm: tfkit.Shared[tfkit.NormConfig]
    """Norm of x, which the sublayer takes, and norm of the output of the second matrix."""

    def build(self, make: tfkit.Make, part: tfkit.StreamPart, width: int) -> nn.Module:
        if part == "read":
            return Normed(self.rank, width, make(self.norm, width), make(self.norm, width))
        return Sum()


class Normed(nn.Module):
    """norm(x) [b, t, m]; for `Sum`, the same after a residual of low rank."""

    def __init__(self, rank: int, width: int, norm_in: nn.Module, norm_out: nn.Module) -> None:
        super().__init__()
        self.norm_in = norm_in
        self.left = Linear(width, rank, bias=False)
        self.right = Linear(rank, width, bias=False)
        self.norm_out = norm_out

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, list[Tensor]]:
        normed = self.norm_in(x)
        return normed, [normed + self.norm_out(self.right(self.left(normed)))]


class Sum(nn.Module):
    """(x + y + kept) / sqrt(2)."""

    def forward(self, x: Tensor, y: Tensor, state: list[Tensor]) -> Tensor:
        return (x + y + state[0]) * 2.0**-0.5


class SparseGLUConfig(tfkit.FFNConfig):
    """Gated; in some layers, a gate is 0 unless it is far above the mean of all gates."""

    kind: Literal["sparse_glu"] = "sparse_glu"
    d_ff: tfkit.Dim
    """Width of the hidden layer."""
    bias: tfkit.Shared[bool] = True
    """If true, the linear layers have biases."""
    activation: tfkit.ActivationConfig = tfkit.slot("gelu")
    """Activation of the gate."""
    sparsity: tuple[tfkit.Probability, ...] = ()
    """Fraction of gates that are 0 in each of the first layers, for normally distributed gates; 0 keeps all gates."""

    @property
    def hidden_width(self) -> int:
        return self.d_ff

    def build(self, make: tfkit.Make) -> nn.Module:
        layer = make.layer or 0
        sparsity = self.sparsity[layer] if layer < len(self.sparsity) else 0.0
        return SparseGLU(self, make(self.activation), NormalDist().inv_cdf(sparsity) if sparsity else None)


class SparseGLU(nn.Module):
    """[..., m] -> [..., m]; gates below the mean plus `cutoff` standard deviations are 0."""

    def __init__(self, config: SparseGLUConfig, activation: nn.Module, cutoff: float | None) -> None:
        super().__init__()
        self.gate_up = Linear(config.d_model, {"gate": config.d_ff, "up": config.d_ff}, bias=config.bias)
        self.activation = activation
        self.down = Linear(config.d_ff, config.d_model, bias=config.bias, residual=True)
        self.cutoff = cutoff

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        cutoff = self.cutoff
        if cutoff is not None:
            mean, std = gate.mean(dim=-1, keepdim=True), gate.std(dim=-1, unbiased=False, keepdim=True)
            gate = F.relu(gate - (mean + std * cutoff))
        return self.down(self.activation(gate) * up)

    def extra_repr(self) -> str:
        return named(cutoff=self.cutoff)

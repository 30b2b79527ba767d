"""Channel mixing of RWKV-4, https://arxiv.org/abs/2305.13048: an FFN of each token and the token before it.

    output = sigmoid(receptance(mix(x))) value(activation(key(mix(x))));  mix(x_t) = mix x_t + (1 - mix) x_(t-1)

b batch, t positions, m d_model, f d_ff.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit.nn import Context, Linear
from tfkit_recurrent.token_shift import previous_tokens, reset_mix


class ChannelMixConfig(tfkit.FFNConfig):
    """An FFN of mixes of each token with the token before it, times the sigmoid of a gate."""

    kind: Literal["channel_mix"] = "channel_mix"
    takes_context = True
    restarts = True
    d_ff: tfkit.Dim
    """Width of the hidden layer."""
    activation: tfkit.ActivationConfig = tfkit.slot("relu2")
    """Activation of the hidden layer."""

    @property
    def hidden_width(self) -> int:
        return self.d_ff

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        return (tfkit.State(1, 1, self.d_model),)

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        """The hidden layer after its activation, and the gate before its sigmoid."""
        return {
            "hidden": tfkit.InnerValue("value", 0, f"[b, t, {self.d_ff}]"),
            "receptance": tfkit.InnerValue("receptance", None, f"[b, t, {self.d_model}]"),
        }

    def build(self, make: tfkit.Make) -> nn.Module:
        height = 1 - (make.layer or 0) / (make.n_layers or 1)
        return ChannelMix(self, make(self.activation), height=height)


class ChannelMix(nn.Module):
    """[b, t, m] -> [b, t, m]; its state, [b, 1, 1, m], is the last token.

    Args:
        config: its sizes.
        activation: of the hidden layer.
        height: the fraction of the layers of the stack that are not before its layer, for initial values.
    """

    def __init__(self, config: ChannelMixConfig, activation: nn.Module, *, height: float) -> None:
        super().__init__()
        width = config.d_model
        self.key_mix = nn.Parameter(torch.empty(width))
        self.receptance_mix = nn.Parameter(torch.empty(width))
        self.key = Linear(width, config.d_ff, bias=False)
        self.activation = activation
        self.value = Linear(config.d_ff, width, bias=False, residual=True)
        self.receptance = Linear(width, width, bias=False)
        self.height = height

    def reset_parameters(self) -> None:
        """Fill the mixes: from 0 to 1 over the channels, and nearer to 1 in later layers."""
        reset_mix(self.key_mix, self.height)
        reset_mix(self.receptance_mix, self.height)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        previous = previous_tokens(x, context, 0)
        hidden = self.activation(self.key(torch.lerp(previous, x, self.key_mix)))
        return torch.sigmoid(self.receptance(torch.lerp(previous, x, self.receptance_mix))) * self.value(hidden)

"""Published initial values of decays and step sizes, to which the spec's `init` does not apply."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIN_STEP, MAX_STEP = 1e-3, 0.1
MIN_RATE, MAX_RATE = 0.01, 16.0


def reset_log_decay(a_log: Tensor) -> None:
    """Fill logarithms of decay rates [..., n] with log(1), log(2), ..., log(n)."""
    rates = torch.arange(1, a_log.size(-1) + 1, dtype=torch.float32, device=a_log.device)
    with torch.no_grad():
        a_log.copy_(rates.log().expand_as(a_log))


def reset_step_bias(bias: Tensor) -> None:
    """Fill the bias under a softplus with steps from 0.001 to 0.1, uniform in their logarithms."""
    with torch.no_grad():
        step = torch.empty_like(bias, dtype=torch.float32).uniform_(math.log(MIN_STEP), math.log(MAX_STEP)).exp()
        bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


def reset_decay_rates(a_log: Tensor) -> None:
    """Fill logarithms of decay rates that are drawn uniformly from 0.01 to 16."""
    with torch.no_grad():
        a_log.copy_(torch.empty_like(a_log, dtype=torch.float32).uniform_(MIN_RATE, MAX_RATE).log())

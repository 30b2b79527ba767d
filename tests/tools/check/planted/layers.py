"""Bugs of norms, FFNs, residuals and experts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tfkit.components import (
    feedforward,
    layer,
    norm,
    stack,
)

from .bug import plant

forward_of_rmsnorm = norm.RMSNorm.forward
forward_of_stack = stack.Stack.forward


@plant("an exact GELU stands for the approximate one", "huggingface/transformers#29402", "gpt2", "meaning", F, "gelu")
def exact(x: Tensor, approximate: str = "none") -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


@plant(
    "the epsilon of a different family is used",
    "TransformerLensOrg/TransformerLens#456",
    "llama",
    "values",
    F,
    "rms_norm",
)
def other_eps(x: Tensor, width: Any, weight: Any, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2) * weight


@plant(
    "the norm multiplies its input in place",
    "GeeeekExplorer/nano-vllm#170",
    "llama",
    "inputs-kept",
    norm.RMSNorm,
    "forward",
)
def in_place(self: Any, x: Tensor) -> Tensor:
    x.data.mul_(1.5)
    return forward_of_rmsnorm(self, x)


@plant("the norm computes in bfloat16", "rounding before the weight", "llama", "meaning", norm.RMSNorm, "forward")
def rounded(self: Any, x: Tensor) -> Tensor:
    return forward_of_rmsnorm(self, x.to(torch.bfloat16).to(x.dtype))


@plant(
    "a norm doubles the gradient of its input",
    "a backward that is written by hand",
    "llama",
    "derivatives",
    norm.RMSNorm,
    "forward",
)
def doubled_gradient(self: Any, x: Tensor) -> Tensor:
    return forward_of_rmsnorm(self, 2 * x - x.detach())


@plant("the final norm is missing", "a stack without its last norm", "llama", "silent", stack.Stack, "forward")
def no_final_norm(self: Any, *args: Any, **given: Any) -> Tensor:
    final, self.final_norm = self.final_norm, None
    found = forward_of_stack(self, *args, **given)
    self.final_norm = final
    return found


@plant("the residual is dropped", "a sum that is an assignment", "llama", "silent", layer, "add")
def no_residual(program: Any, step: Any, x: Any, y: Any, width: int) -> Any:
    return y


@plant("half of the hidden layer is dead", "a slice too short", "gpt2", "every-row", feedforward.MLP, "forward")
def half_dead(self: Any, x: Tensor) -> Tensor:
    hidden = self.activation(self.up(x))
    return self.down(
        torch.cat((hidden[..., : hidden.size(-1) // 2], torch.zeros_like(hidden[..., hidden.size(-1) // 2 :])), -1)
    )

"""Bugs of layers: norms, FFNs, residuals, experts, and layers with a state, for which retention is the example."""

from __future__ import annotations

import math
from typing import Any

import torch
from tfkit_moe import Router
from torch import Tensor
from torch.nn import functional as F

from tfkit.components import context, feedforward, layer, norm, stack
from tfkit.nn import Past

from ..models import Retention
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
    "unchanged-inputs",
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


@plant("the final norm is missing", "a stack without its last norm", "llama", "zero-sublayers", stack.Stack, "forward")
def no_final_norm(self: Any, *args: Any, **options: Any) -> Tensor:
    final, self.final_norm = self.final_norm, None
    actual = forward_of_stack(self, *args, **options)
    self.final_norm = final
    return actual


write_step = layer._StepWriter.write


@plant("the residual is dropped", "a sum that is an assignment", "llama", "zero-sublayers", layer._StepWriter, "write")
def no_residual(self: Any, step: Any, x: Any, layer_input: Any) -> Any:
    return self.program.apply(f"{step.name}_alone", torch.sub, write_step(self, step, x, layer_input), x)


@plant("half of the hidden layer is dead", "a slice too short", "gpt2", "every-row", feedforward.MLP, "forward")
def half_dead(self: Any, x: Tensor) -> Tensor:
    hidden = self.activation(self.up(x))
    return self.down(
        torch.cat((hidden[..., : hidden.size(-1) // 2], torch.zeros_like(hidden[..., hidden.size(-1) // 2 :])), -1)
    )


forward_of_router = Router.forward


@plant("the router has no bias", "pytorch/torchtitan#2319", "mixture", "gradients", Router, "logits")
def without_bias(self: Any, x: Tensor) -> Tensor:
    return F.linear(x.float(), self.weight.float())


@plant("weights of experts are not renormalized", "pytorch/torchtitan#2319", "mixture", "values", Router, "forward")
def as_scored(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = self.score(self.logits(x))
    chosen = self.choose(scores.detach())
    return scores.gather(-1, chosen), chosen


@plant(
    "experts drop tokens beyond their capacity", "NVIDIA/Megatron-LM#5542", "mixture", "neighbours", Router, "forward"
)
def capacity(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = forward_of_router(self, x)
    index = F.one_hot(chosen.flatten(), self.out_features).cumsum(0).gather(1, chosen.flatten()[:, None])
    return weights * (index.view(chosen.shape) <= x.size(0) // 2), chosen


forward_of_retention = Retention.forward
count_positions = context.count_positions


@plant(
    "the state decays twice in a single step",
    "huggingface/transformers#46190",
    "retention",
    "cached",
    Retention,
    "forward",
)
def twice(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return forward_of_retention(self, q, k, v, mask * 2 if q.size(2) == 1 else mask)


@plant(
    "the state decays over padding on the right",
    "huggingface/transformers#48256",
    "retention",
    "cached",
    stack,
    "count_positions",
)
def over_padding(x: Tensor, mask: Any, past: Past | None) -> Tensor:
    if past is not None and past.lengths is not None:
        past = past._replace(lengths=torch.full_like(past.lengths, past.start))
    return count_positions(x, mask, past)


@plant("padding enters the state", "huggingface/transformers#32677", "retention", "padding", Retention, "forward")
def entered(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    earlier = torch.ones(mask.shape[-2:]).tril(k.size(2) - q.size(2)) > 0
    return forward_of_retention(self, q, k, v, torch.where(earlier & (mask == -torch.inf), 0.0, mask))

"""The router: the experts of each token, and their weights.

    logits = linear(logit_scale * norm(x))
    scores = score(logits)                           or, topk_then_score: the logits themselves
    chosen = the k largest of scores + correction    among the best groups of experts
    weights = scores of the chosen                   topk_then_score: score(logits of the chosen)

Among equal scores, the first experts are chosen. `sparse_mixer.py` has a different choice, one expert after another.

score_then_topk: https://arxiv.org/abs/2101.03961. topk_then_score: https://arxiv.org/abs/1701.06538.
Groups: https://arxiv.org/abs/2405.04434. Sigmoid and a correction that balances the load:
https://arxiv.org/abs/2412.19437.

s tokens, e experts, a experts of one token, g groups of experts, r experts of one group, m d_model.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfkit import Config, Count, Invalid, NormConfig, PositiveFloat
from tfkit.nn import Linear, Rearrange, choose_top, is_scripting, named
from tfkit_moe.sparse_mixer import SparseMixer, SparseMixerConfig


class GroupsConfig(Config):
    """Groups of adjacent experts; a token chooses its experts within its best groups."""

    n: Count
    """Number of groups, which have equal sizes."""
    keep: Count
    """Number of groups within which a token chooses."""
    by: Literal["max", "top2sum"] = "max"
    """Score of a group: its best score, or the sum of its two best scores."""

    def check(self) -> None:
        """Raise `Invalid` if all groups are kept."""
        super().check()
        if self.keep >= self.n:
            message = f"`groups` has no effect: all groups are kept, {self.keep} of {self.n}"
            raise Invalid("keep", message, help="keep fewer than n groups, or remove `groups`")


class RouterConfig(Config):
    """Choice of the experts of a token, and their weights. Computed in float32."""

    norm: NormConfig | None = None
    """Norm of the tokens before the router's linear layer."""
    logit_scale: PositiveFloat = 1.0
    """Factor of the tokens before the router's linear layer, after `norm`; `bias` is not multiplied by it."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from logits to scores: softmax over the experts, or sigmoid for each expert separately."""
    order: Literal["score_then_topk", "topk_then_score"] = "score_then_topk"
    """Order of the steps: the k best by score; or the k best by logit, which are then scored among themselves."""
    renormalize: bool = False
    """If true, the weights of a token are divided by their sum."""
    eps: PositiveFloat | None = None
    """Number that is added to this sum."""
    scale: PositiveFloat = 1.0
    """Factor of the weights."""
    expert_scale: bool = False
    """If true, a learned number for each expert multiplies its weight, after `renormalize`. It starts at one."""
    weighs: Literal["output", "input"] = "output"
    """The side of an expert that its weight multiplies."""
    correction_bias: bool = False
    """If true, a number per expert is added to the scores that decide the choice, and not to the weights. It starts at
    zero and has no gradient: a training loop moves it, or published weights have it."""
    groups: GroupsConfig | None = None
    """Groups of experts; a token chooses within its best groups. By default, it chooses among all experts."""
    bias: bool = False
    """If true, the logits have a learned bias."""
    softcap: PositiveFloat | None = None
    """Soft bound of the logits, softcap * tanh(logits / softcap)."""
    capacity: Count | None = None
    """Number of tokens of a row that an expert admits, the first that choose it. Later tokens have the weight 0 for it.
    By default, it admits all."""
    sparse_mixer: SparseMixerConfig | None = None
    """Choice of one expert after another, instead of the best experts together. Its weights replace `score`."""

    def check(self) -> None:
        """Raise `Invalid` for fields without effect."""
        super().check()
        if self.sparse_mixer is not None:
            self._check_mixed()
        if self.renormalize and self.score == "softmax" and self.order == "topk_then_score":
            message = "`renormalize` has no effect: the softmax over the chosen experts adds up to 1 already"
            raise Invalid("renormalize", message, help="remove it, or write `order: score_then_topk`")
        if self.eps is not None and not self.renormalize:
            raise Invalid("eps", "`eps` has no effect without `renormalize: true`: nothing is divided")
        if self.capacity is not None and self.weighs == "input":
            message = "`capacity` cannot be combined with `weighs: input`: experts turn an input of 0 into their biases"
            raise Invalid("capacity", message, help="write `weighs: output`")

    def _check_mixed(self) -> None:
        """Raise `Invalid` for fields of a choice by scores, if experts are chosen by `sparse_mixer`."""
        for name in ("score", "order", "correction_bias", "groups"):
            if getattr(self, name) != type(self).model_fields[name].default:
                message = f"`{name}` cannot be combined with `sparse_mixer`, which chooses by logits and softmaxes"
                raise Invalid(name, message, help=f"remove `{name}` or `sparse_mixer`")


class SoftBound(nn.Module):
    """Logits [s, e] -> softcap * tanh(logits / softcap), or the logits themselves without a softcap.

    A module, so that hooks can record the logits.
    """

    def __init__(self, softcap: float | None) -> None:
        super().__init__()
        self.softcap = softcap

    def forward(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def extra_repr(self) -> str:
        return named(softcap=self.softcap)


class Router(Linear):
    """Tokens [s, m] -> weights [s, a], float32, and the indices of the experts [s, a].

    A forward hook on it reads the routing, for a loss that balances the load or for inspection.
    """

    def __init__(
        self, config: RouterConfig, *, d_model: int, n_experts: int, n_experts_per_token: int, norm: nn.Module | None
    ) -> None:
        super().__init__(d_model, n_experts, bias=config.bias)
        self.norm = norm
        self.logit_scale = config.logit_scale
        self.k = n_experts_per_token
        self.softmax = config.score == "softmax"
        self.topk_first = config.order == "topk_then_score"
        self.bound = SoftBound(config.softcap)
        self.renormalize = config.renormalize
        self.eps = config.eps or 0.0
        self.scale = config.scale
        self.split_groups, self.merge_groups = None, None
        if config.groups:
            self.split_groups = Rearrange("s (g r) -> s g r", g=config.groups.n, gr=n_experts)
            self.merge_groups = Rearrange("s g r -> s (g r)")
        self.n_kept = config.groups.keep if config.groups else 1
        self.n_best = 2 if config.groups and config.groups.by == "top2sum" else 1
        self.correction = nn.Parameter(torch.empty(n_experts), requires_grad=False) if config.correction_bias else None
        self.expert_scale = nn.Parameter(torch.empty(n_experts)) if config.expert_scale else None
        self.mixer = None
        if config.sparse_mixer:
            mixer = config.sparse_mixer
            self.mixer = SparseMixer(n_experts_per_token, jitter=mixer.jitter, sampled=mixer.sampled)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.logits(x)
        weights, chosen = self.by_score(logits) if self.mixer is None else self.mixer(logits)
        if self.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + self.eps)
        if self.scale != 1.0:
            weights = weights * self.scale
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[chosen]
        return weights, chosen

    def by_score(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the best experts [s, a], with the scores [s, a] that are their weights."""
        scores = logits if self.topk_first else self.score(logits)
        chosen = self.choose(scores.detach())
        weights = scores.gather(-1, chosen)
        return self.score(weights) if self.topk_first else weights, chosen

    def logits(self, x: Tensor) -> Tensor:
        """Compute logits [s, e] from tokens [s, m], in float32 even if the model has another dtype."""
        bias: Tensor | None = self.bias
        if bias is not None:
            bias = bias.float()
        x = x.float() if self.norm is None else self.norm(x).float()
        if self.logit_scale != 1.0:
            x = x * self.logit_scale
        logits: Tensor = self.bound(_linear_without_autocast(x, self.weight.float(), bias))
        return logits

    def score(self, logits: Tensor) -> Tensor:
        """Turn logits [s, ...] into scores of the same shape."""
        return torch.softmax(logits, dim=-1) if self.softmax else torch.sigmoid(logits)

    def choose(self, scores: Tensor) -> Tensor:
        """Choose the experts [s, a], in ascending order, from scores [s, e]."""
        if self.correction is not None:
            scores = scores + self.correction
        if self.split_groups is not None and self.merge_groups is not None:
            groups = self.split_groups(scores)
            allowed = self.merge_groups(self.best(groups).expand_as(groups))
            scores = scores.masked_fill(~allowed, -math.inf)
        n = scores.size(-1)
        experts = torch.arange(n, device=scores.device).expand_as(scores)
        return torch.topk(experts.masked_fill(~choose_top(scores, self.k), n), self.k, dim=-1, largest=False)[0]

    def best(self, groups: Tensor) -> Tensor:
        """Mark the best groups in scores [s, g, r]: bool [s, g, 1]."""
        worth = torch.topk(groups, self.n_best, dim=-1)[0].sum(dim=-1)
        return choose_top(worth, self.n_kept).unsqueeze(-1)

    def extra_repr(self) -> str:
        score = f"{'softmax' if self.softmax else 'sigmoid'} {'after' if self.topk_first else 'before'} topk"
        by = "top2sum" if self.n_best == 2 else "max"
        groups = {"keep": self.n_kept, "by": by} if self.split_groups is not None else None
        correction = self.correction is not None
        choice = named(
            "sparse mixer" if self.mixer is not None else score,
            n_experts_per_token=self.k,
            correction=correction,
            groups=groups,
            logit_scale=self.logit_scale,
        )
        weights = named(
            choice,
            renormalize=self.renormalize,
            eps=self.eps,
            scale=self.scale,
            expert_scale=self.expert_scale is not None,
        )
        return f"{super().extra_repr()}\n{weights}"


def _linear_without_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer without autocast, which would round logits to 8 bits.

    Scripted code cannot leave autocast.
    """
    if not is_scripting():  # noqa: SIM102  TorchScript skips this `if`, but would compile its condition
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return F.linear(x, weight, bias)
    return F.linear(x, weight, bias)

"""Mixture of experts: a router sends each token to a few of many feed-forward networks, https://arxiv.org/abs/2101.03961.

Each branch, the chosen experts and the shared experts, may have a norm before and after it: the layer then has no norm
before its FFN, and the router takes the tokens without a norm, or has a separate norm.

    y = norm_out(experts(norm_in(x), router(x))) + shared.norm_out(shared(shared.norm_in(x)))

Shared: https://arxiv.org/abs/2401.06066. Norms of branches: Gemma 4 in https://github.com/huggingface/transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

import tfkit
from tfkit import Count, Dim, Invalid, NormConfig, PositiveFloat, Shared
from tfkit.nn import Context, Linear, settings
from tfkit_moe.capacity import Capacity
from tfkit_moe.experts import Experts, Gate, SharedExperts
from tfkit_moe.router import Router, RouterConfig


class SharedConfig(tfkit.Config):
    """The experts that every token goes through, as one feed-forward network."""

    d_ff: Dim
    """Width of the hidden layer: the total width of all shared experts."""
    gate: bool = False
    """If true, the output is multiplied by sigmoid(linear(x)), one number per token."""
    bias: bool | None = None
    """If true, its linear layers have biases; by default, `bias` of the other experts applies."""
    combine: Literal["sum", "average"] = "sum"
    """Result of the layer: the sum of the outputs of shared and chosen experts, or half of it."""
    norm_in: NormConfig | None = None
    """Norm of the tokens before the shared experts."""
    norm_out: NormConfig | None = None
    """Norm of the output of the shared experts."""


class MoEConfig(tfkit.FFNConfig):
    """Each token goes through a few of many feed-forward networks."""

    kind: Literal["moe"] = "moe"
    drawn_apart = True
    restarts = True
    score_parameters = ("router.weight", "router.bias", "router.correction")
    n_experts: Count
    """Number of experts to choose from."""
    n_experts_per_token: Count
    """Number of experts that a token goes through."""
    d_ff: Dim
    """Width of the hidden layer of one expert."""
    bias: Shared[bool] = True
    """If true, the linear layers of the experts have biases; also of the shared experts, unless they set `bias`."""
    activation: tfkit.ActivationConfig = tfkit.slot("silu")
    """Activation of all experts, including the shared experts."""
    gated: bool = True
    """If true, the hidden layer is activation(gate(x)) * up(x); otherwise activation(up(x))."""
    limit: PositiveFloat | None = None
    """Bound for gate from above, and for up on both sides, before they are multiplied."""
    up_offset: Literal[0, 1] = 0
    """Number that is added to up after `limit`."""
    norm_in: NormConfig | None = None
    """Norm of the tokens before the chosen experts; the router and the shared experts take the tokens without it."""
    norm_out: NormConfig | None = None
    """Norm of the weighted sum of the chosen experts' outputs, before the shared experts are added."""
    router: RouterConfig = RouterConfig()
    """Choice of the experts of a token, and their weights."""
    shared: SharedConfig | None = None
    """Experts that every token goes through."""

    def check(self) -> None:
        """Raise `Invalid` for an impossible choice of experts, and for fields without effect."""
        super().check()
        if self.n_experts_per_token > self.n_experts:
            message = f"a token cannot go through {self.n_experts_per_token} experts: there are {self.n_experts}"
            raise Invalid("n_experts_per_token", message)
        if not self.gated:
            self._check_plain()
        if self.n_experts_per_token == self.n_experts:
            self._check_all()
        if self.router.groups is not None:
            self._check_groups(self.router.groups.n, self.router.groups.keep)

    def _check_plain(self) -> None:
        """Raise `Invalid` for settings of a gate that does not exist."""
        for name, is_set in (("limit", self.limit is not None), ("up_offset", self.up_offset != 0)):
            if is_set:
                raise Invalid(name, f"`{name}` has no effect without a gate", help="write `gated: true`")

    def _check_all(self) -> None:
        """Raise `Invalid` for settings of the router if every expert is chosen."""
        for name, is_set in (("correction_bias", self.router.correction_bias), ("groups", self.router.groups)):
            if is_set:
                message = f"`{name}` has no effect: a token goes through all {self.n_experts} experts"
                raise Invalid(f"router.{name}", message)

    def _check_groups(self, n: int, keep: int) -> None:
        """Raise `Invalid` for groups of different sizes, and for groups that are too small."""
        if self.n_experts % n:
            message = f"{self.n_experts} experts cannot be divided into {n} groups of equal size"
            notes = [f"divisors of {self.n_experts}: {tfkit.divisors(self.n_experts)}"]
            raise Invalid("router.groups.n", message, notes=notes)
        size = self.n_experts // n
        if keep * size < self.n_experts_per_token:
            message = f"{keep} groups must hold {self.n_experts_per_token} or more experts; got {keep * size}"
            raise Invalid("router.groups.keep", message, help="keep more groups, or make them larger")
        if size == 1 and self.router.groups is not None and self.router.groups.by == "top2sum":
            raise Invalid("router.groups.by", "`top2sum` must have at least two experts in each group; got one")

    @property
    def takes_context(self) -> bool:  # type: ignore[override]
        """True if experts have a capacity, which tokens of a row share; other mixtures compute each token alone."""
        return self.router.capacity is not None

    @property
    def cached(self) -> tuple[tfkit.State, ...]:
        """The number of tokens that chose each expert, if experts have a capacity."""
        return () if self.router.capacity is None else (tfkit.State(1, 1, self.n_experts, wide=True),)

    @property
    def hidden_width(self) -> int:
        return self.d_ff

    @property
    def inner_values(self) -> Mapping[str, tfkit.InnerValue]:
        """The logits of all experts, the weights of each token's experts, and the numbers of these experts.

        With a capacity, also whether these experts admit the token; the weights are the weights before admission.
        """
        shape = f"[b*t, {self.n_experts_per_token}]"
        chosen = {name: tfkit.InnerValue("router", None, shape, item=i) for i, name in enumerate(("router", "experts"))}
        if self.router.capacity is not None:
            chosen["admitted"] = tfkit.InnerValue("capacity", None, f"[b, t, {self.n_experts_per_token}]")
        return {"router_logits": tfkit.InnerValue("router.bound", None, f"[b*t, {self.n_experts}]"), **chosen}

    def build(self, make: tfkit.Make) -> nn.Module:
        router = Router(
            self.router,
            d_model=self.d_model,
            n_experts=self.n_experts,
            n_experts_per_token=self.n_experts_per_token,
            norm=self._build_norm(make, self.router.norm),
        )
        norms = self._build_norm(make, self.norm_in), self._build_norm(make, self.norm_out)
        return MoE(
            self, router=router, experts=self._build_activation(make), shared=self._build_shared(make), norms=norms
        )

    def _build_shared(self, make: tfkit.Make) -> SharedExperts | None:
        config = self.shared
        if config is None:
            return None
        norms = self._build_norm(make, config.norm_in), self._build_norm(make, config.norm_out)
        bias = self.bias if config.bias is None else config.bias
        activation = self._build_activation(make)
        return SharedExperts(activation, norms=norms, d_model=self.d_model, d_ff=config.d_ff, bias=bias)

    def _build_norm(self, make: tfkit.Make, norm: NormConfig | None) -> nn.Module | None:
        return None if norm is None else make(norm, self.d_model)

    def _build_activation(self, make: tfkit.Make) -> nn.Module:
        activation = make(self.activation)
        return Gate(activation, limit=self.limit, up_offset=self.up_offset) if self.gated else activation


class MoE(nn.Module):
    """[..., d_model] -> [..., d_model]: the weighted outputs of each token's experts, and of the shared experts.

    `experts` is the activation of the experts, and `norms` are the norms of their input and of their weighted sum. With
    a capacity, x is [b, t, d_model] and `context` its context.
    """

    extra_repr = settings

    def __init__(
        self,
        config: MoEConfig,
        *,
        router: Router,
        experts: nn.Module,
        shared: SharedExperts | None,
        norms: tuple[nn.Module | None, nn.Module | None],
    ) -> None:
        super().__init__()
        self.router = router
        self.norm_in, self.norm_out = norms
        capacity = config.router.capacity
        self.capacity = None if capacity is None else Capacity(capacity, config.n_experts)
        self.experts = Experts(
            experts,
            n=config.n_experts,
            per_token=config.n_experts_per_token,
            d_model=config.d_model,
            d_ff=config.d_ff,
            bias=config.bias,
            weighs_input=config.router.weighs == "input",
        )
        self.shared, self.shared_gate, self.averages = shared, None, False
        if config.shared is not None:
            self.shared_gate = Linear(config.d_model, 1, bias=False) if config.shared.gate else None
            self.averages = config.shared.combine == "average"

    def reset_parameters(self) -> None:
        """Fill the tensors that the spec's `init` does not fill; it fills weights and biases of linear layers."""
        if self.router.correction is not None:
            nn.init.zeros_(self.router.correction)
        if self.router.expert_scale is not None:
            nn.init.ones_(self.router.expert_scale)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens)
        if self.capacity is not None:
            assert context is not None
            weights = weights * self.capacity(chosen.view(x.size(0), x.size(1), -1), context).view_as(weights)
        inputs = tokens if self.norm_in is None else self.norm_in(tokens)
        out = self.experts(inputs, chosen, weights)  # in the order of transformers, whose plans divide weights
        if self.norm_out is not None:
            out = self.norm_out(out)
        if self.shared is not None:
            shared = self.shared(tokens)
            if self.shared_gate is not None:
                shared = torch.sigmoid(self.shared_gate(tokens)) * shared
            out = out + shared
            if self.averages:
                out = out / 2
        return out.view(x.shape)

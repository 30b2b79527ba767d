"""The loss kind `balanced`: a base loss plus terms that balance the routers of mixtures and keep their logits small.

    balance = e * sum over experts of (fraction of the choices) * (mean score)      https://arxiv.org/abs/2101.03961
    z       = mean over tokens of logsumexp(logits)^2                               https://arxiv.org/abs/2202.08906

Both terms cover the tokens of all layers together, without padding. The loss reads the routers through hooks, which
exist only during its forward.

b sequences, t positions, s tokens, l layers, e experts, a experts of one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, fx, nn
from torch.nn import functional as F

import tfkit
from tfkit import Invalid
from tfkit_moe.moe import MoE

IGNORE_INDEX = -100
"""The target of a position that does not count."""
Weight = Annotated[float, Field(ge=0)]


class BalancedConfig(tfkit.LossConfig):
    """Another loss, and terms that balance the load of the experts and keep the logits of their routers small."""

    kind: Literal["balanced"] = "balanced"

    base: tfkit.LossConfig = tfkit.slot("cross_entropy")
    """The loss that the terms are added to."""
    balance: tfkit.Changeable[Weight] = 0.01
    """The weight of the load balance, which is at least 1, or for unequal scores a bit less."""
    router_z: tfkit.Changeable[Weight] = 0.0
    """The weight of the squared logarithm of the sum of the exponentials of a router's logits."""
    over: Literal["batch", "sequence"] = "batch"
    """The tokens that should be balanced: all tokens of a step, as in transformers; or the tokens of each sequence.
    Only `sequence` can be computed in micro-batches or by several processes."""

    def check(self) -> None:
        """Raise `Invalid` for terms without weight."""
        super().check()
        if not self.balance and not self.router_z:
            raise Invalid("balance", "`balanced` has no effect: both weights are 0", help="write `loss: cross_entropy`")

    @property
    def terms(self) -> Mapping[str, Any]:
        return self.base.terms

    @property
    def inputs_ahead(self) -> Mapping[str, int]:
        return self.base.inputs_ahead

    @property
    def undivided(self) -> bool:
        return self.over == "batch" or self.base.undivided

    @property
    def predicts_targets(self) -> bool:
        return self.base.predicts_targets

    def build(self, model: fx.GraphModule) -> nn.Module:
        return BalancedLoss(model, self.base.build(model), self)


class BalancedLoss(nn.Module):
    """Inputs and targets -> the sum of the base loss over positions that count, plus the terms times their number."""

    def __init__(self, model: fx.GraphModule, base: nn.Module, config: BalancedConfig) -> None:
        super().__init__()
        self.base, self.config = base, config
        self.balance, self.router_z = config.balance, config.router_z
        graph: tfkit.Graph = model.meta["graph"]
        layers = {f"{name}.router": module for name, module in model.named_modules() if isinstance(module, MoE)}
        self.routers = {name: layer.router for name, layer in layers.items()}
        self.tokens_first = {name for name, layer in layers.items() if layer.capacity is not None}
        self.masks = {name: graph.node(name.partition(".")[0]).output.mask for name in self.routers}
        if not self.routers:
            raise ValueError(f"`balanced` must have a mixture of experts to balance; `{graph.name}` has none")
        sizes = {(router.weight.size(0), router.k) for router in self.routers.values()}
        if len(sizes) > 1:
            raise ValueError(
                "`balanced` must have the same number of experts, and of experts of a token, in all layers"
            )
        self.weight = next((term.weight for term in config.terms.values()), 1.0)

    def forward(self, inputs: Mapping[str, Tensor], targets: Any) -> Tensor:
        with self._routed() as routed:
            sums: Tensor = self.base(inputs, targets)
        first = targets if isinstance(targets, Tensor) else next(iter(targets.values()))
        counts = (first != IGNORE_INDEX).reshape(len(first), -1).sum(1)
        layers = [
            self._of_sequences(name, inputs, *routed[name], len(first)) for name in self.routers if name in routed
        ]
        if self.config.over == "batch":
            total = counts.sum() * self._terms([tuple(part.flatten(0, 1)[None] for part in layer) for layer in layers])
        else:
            total = counts * self._terms(layers)
        main, *further = sums.reshape(-1)
        return torch.stack([main + total.sum() / self.weight, *further])  # the loop multiplies the first by its weight

    def _of_sequences(
        self, name: str, inputs: Mapping[str, Tensor], logits: Tensor, chosen: Tensor, n: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [b, t, e], the chosen experts [b, t, a], and a mask [b, t] that is 0 at padding."""
        mask = inputs.get(self.masks[name] or "")
        if mask is None:
            mask = torch.ones(n, len(logits) // n, device=logits.device)
        elif mask.dim() == 3:
            mask = mask.diagonal(dim1=1, dim2=2)
        if name in self.tokens_first:
            mask = mask.sort(dim=1, descending=True)[0]  # a stack moves padding behind the tokens of such a layer
        return logits.view(*mask.shape, -1), chosen.view(*mask.shape, -1), mask.to(logits.dtype)

    def _terms(self, layers: Any) -> Tensor:
        """Return the weighted terms of each group of tokens, [b]."""
        total = cast(Tensor, sum(mask.sum(1) for _, _, mask in layers)).clamp(min=1)
        terms = torch.zeros_like(total)
        if self.balance:
            n = layers[0][0].size(-1)
            chosen = sum((F.one_hot(chosen, n).sum(2) * mask[..., None]).sum(1) for _, chosen, mask in layers)
            scores = sum((self._scores(logits) * mask[..., None]).sum(1) for logits, _, mask in layers)
            load = n * (chosen / total[:, None] * scores / total[:, None]).sum(-1)
            terms = terms + self.balance * load
        if self.router_z:
            squares = sum((logits.logsumexp(-1).square() * mask).sum(1) for logits, _, mask in layers)
            terms = terms + self.router_z * squares / total
        return terms

    def _scores(self, logits: Tensor) -> Tensor:
        """Return the scores of all experts, which sum to 1: normalized for a router with sigmoids."""
        if next(iter(self.routers.values())).softmax:
            return torch.softmax(logits, dim=-1)
        scores = torch.sigmoid(logits)
        return scores / scores.sum(-1, keepdim=True)

    @contextmanager
    def _routed(self) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        """Register hooks on the routers, which write logits [s, e] and choices [s, a] to the mapping of the context."""
        routed: dict[str, tuple[Tensor, Tensor]] = {}
        handles = [r.register_forward_hook(partial(_record, routed, name)) for name, r in self.routers.items()]
        try:
            yield routed
        finally:
            for handle in handles:
                handle.remove()


def _record(
    routed: dict[str, tuple[Tensor, Tensor]], name: str, router: nn.Module, args: tuple[Tensor], output: Any
) -> None:
    # The logits are recomputed, which is a product with few columns, so that the output of the module does not change.
    routed[name] = router.logits(*args), output[1]  # type: ignore[operator]

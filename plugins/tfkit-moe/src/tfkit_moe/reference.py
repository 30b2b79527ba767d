"""Definition of the mixture in NumPy, token by token, independent of its modules: a function for `tfkit.reference`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from tfkit.reference import Part


def moe(part: Part, x: Any) -> Any:
    """Add the weighted outputs of each token's experts and of the shared experts; x [t, d_model]."""
    config, y = part.config, np.zeros_like(x)
    inputs = part.at("norm_in", config.norm_in)(x)
    choices = Counter[int]()
    for token, logits in enumerate(_logits(part, x)):
        for expert, weight in _routed(part, logits):
            choices[expert] += 1
            if config.router.capacity is not None and choices[expert] > config.router.capacity:
                continue  # dropped: https://arxiv.org/abs/2101.03961, section 2.2
            before, after = (weight, 1.0) if config.router.weighs == "input" else (1.0, weight)
            y[token] += after * _network(part, part.at("experts"), before * inputs[token], config.bias, expert)
    y = part.at("norm_out", config.norm_out)(y)
    if config.shared is None:
        return y
    bias = config.bias if config.shared.bias is None else config.shared.bias
    shared = part.at("shared.norm_in", config.shared.norm_in)(x)
    shared = _network(part, part.at("shared"), shared, bias, ...)
    shared = part.at("shared.norm_out", config.shared.norm_out)(shared)
    if config.shared.gate:
        shared = shared / (1 + np.exp(-part.at("shared_gate").linear(x, False)))
    return (y + shared) / (2 if config.shared.combine == "average" else 1)


def _logits(part: Part, x: Any) -> Any:
    router = part.config.router
    x = router.logit_scale * part.at("router.norm", router.norm)(x)
    logits = x @ part.weight("router.weight").T + (part.weight("router.bias") if router.bias else 0)
    return logits if router.softcap is None else router.softcap * np.tanh(logits / router.softcap)


def _routed(part: Part, logits: Any) -> list[tuple[int, float]]:
    """Choose the experts of a token, with the weight of each. arXiv:2101.03961, arXiv:1701.06538."""
    router, k = part.config.router, part.config.n_experts_per_token
    if router.sparse_mixer is not None:
        return _weighted(part, *_mixed(logits, k, router.sparse_mixer.jitter))
    scores = logits if router.order == "topk_then_score" else _scored(router, logits)
    # A correction affects only the choice, not the weights: https://arxiv.org/abs/2412.19437, section 2.1.2.
    worth = scores + (part.weight("router.correction") if router.correction_bias else 0)
    if router.groups is not None:  # https://arxiv.org/abs/2405.04434, section 2.2.2
        groups, best = worth.reshape(router.groups.n, -1), 2 if router.groups.by == "top2sum" else 1
        kept_groups = np.argsort(-np.sort(groups, axis=1)[:, -best:].sum(axis=1), kind="stable")[: router.groups.keep]
        worth = np.where(np.isin(np.arange(router.groups.n), kept_groups)[:, None], groups, -np.inf).ravel()
    chosen = np.argsort(-worth, kind="stable")[:k]  # among equal scores, the first experts
    weights = _scored(router, logits[chosen]) if router.order == "topk_then_score" else scores[chosen]
    return _weighted(part, chosen.tolist(), weights)


def _mixed(logits: Any, k: int, jitter: float) -> tuple[list[int], Any]:
    """Choose k experts of a token one after another, each with its softmax over the experts near it.

    arXiv:2409.12136, section 2.2: expert i is ignored if (best - logit_i) / max(|logit_i|, best) > 2 jitter.
    """
    chosen: list[int] = []
    weights = []
    for _ in range(k):
        left = [i for i in range(len(logits)) if i not in chosen]
        expert = max(left, key=lambda i: (logits[i], -i))
        best = logits[expert]
        near = [i for i in left if best - logits[i] <= 2 * jitter * max(abs(logits[i]), best)]
        weights.append(1 / sum(np.exp(logits[i] - best) for i in near))
        chosen.append(expert)
    return chosen, np.array(weights)


def _weighted(part: Part, chosen: list[int], weights: Any) -> list[tuple[int, float]]:
    """Return the experts of a token with their final weights."""
    router = part.config.router
    if router.renormalize:
        weights = weights / (weights.sum() + (router.eps or 0))
    if router.expert_scale:
        weights = weights * part.weight("router.expert_scale")[chosen]
    return list(zip(chosen, (router.scale * weights).tolist(), strict=True))


def _scored(router: Any, logits: Any) -> Any:
    if router.score == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def _network(part: Part, location: Part, x: Any, bias: bool, expert: Any) -> Any:
    """Compute a feed-forward network: an expert or, for `...`, the shared network."""
    config = part.config

    def layer(name: str, x: Any) -> Any:
        b = location.weight(f"{name}.bias")[expert] if bias else 0
        return x @ location.weight(f"{name}.weight")[expert].T + b

    activation = location.at("activation.activation" if config.gated else "activation", config.activation)
    if not config.gated:
        return layer("down", activation(layer("up", x)))
    y = layer("gate_up", x)
    gate, up = location.at("gate_up").split(y, dict.fromkeys(("gate", "up"), y.shape[-1] // 2))
    if config.limit is not None:
        gate, up = np.minimum(gate, config.limit), np.clip(up, -config.limit, config.limit)
    return layer("down", activation(gate) * (up + config.up_offset))

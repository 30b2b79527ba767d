"""The training step of a run in NumPy, in float64: batches, schedules, optimizers and losses, each from its paper.

    data         config, tokens [t], their documents, True where a token is real    -> the target of each position
    schedule     config, step from 1, number of steps                               -> the factor of the learning rate
    optimizer    config, weight, gradients and learning rates of all steps, decay   -> the weight afterwards
    loss         config, logits [n, v], targets [n], -100 where nothing counts      -> the sum over what counts

An optimizer of single matrices, which leaves a `rest` to a second optimizer, takes one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfkit.reference.model import Array, Kinds

IGNORE_INDEX = -100
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Factors of the powers 1, 3 and 5 in an iteration of Muon."""

# ---- batches, position by position ----

UNSEEN = -1
"""The target of a position whose next token is not in its row."""


def next_tokens(config: Any, tokens: Array, documents: Array, real: Array) -> Array:
    """Return the next token of each position. The last token of a document has no target."""
    targets = np.full(len(tokens), UNSEEN)
    for position in range(len(tokens) - 1):
        if documents[position + 1] != documents[position]:
            targets[position] = IGNORE_INDEX
        elif real[position + 1]:
            targets[position] = tokens[position + 1]
    return targets


def targets_at(shift: int, targets: Array, documents: Array) -> Array:
    """Return the target of an output at each position: the target `shift - 1` positions later in the document."""
    shifted = np.full_like(targets, IGNORE_INDEX)
    for position in range(len(targets) - shift + 1):
        if documents[position + shift - 1] == documents[position]:
            shifted[position] = targets[position + shift - 1]
    return shifted


def tokens_ahead(distance: int, tokens: Array, documents: Array) -> Array:
    """Return the token `distance` positions after each position, 0 after the end of the document and of the row."""
    ahead = np.zeros_like(tokens)
    for position in range(len(tokens) - distance):
        if documents[position + distance] == documents[position]:
            ahead[position] = tokens[position + distance]
    return ahead


def documents_mask(documents: Array, real: Array) -> Array:
    """Return True for pairs of positions of one document; all padding is one more document."""
    pairs = np.zeros((len(documents), len(documents)), bool)
    for query, key in np.ndindex(pairs.shape):
        same = documents[query] == documents[key] if real[query] else True
        pairs[query, key] = same and real[query] == real[key]
    return pairs


# ---- schedules ----


def _count(part: int | float, steps: int) -> int:
    return part if isinstance(part, int) else round(part * steps)


def _warmup(config: Any, step: int, steps: int) -> tuple[float, float]:
    """Return the factor of the warmup, and the fraction of the steps after the warmup that are complete."""
    peak = max(_count(config.warmup, steps), 1)
    return min(step / peak, 1.0), max(step - peak, 0) / max(steps - peak, 1)


def constant(config: Any, step: int, steps: int) -> float:
    """Rise to 1 and stay."""
    return _warmup(config, step, steps)[0]


def linear(config: Any, step: int, steps: int) -> float:
    """Rise to 1 and fall along a line."""
    factor, progress = _warmup(config, step, steps)
    return factor * float(np.interp(progress, [0, 1], [1, config.end]))


def cosine(config: Any, step: int, steps: int) -> float:
    """Rise to 1 and fall along half a wave: https://arxiv.org/abs/1608.03983."""
    factor, progress = _warmup(config, step, steps)
    return float(factor * (config.end + (1 - config.end) * math.cos(math.pi * progress / 2) ** 2))


def wsd(config: Any, step: int, steps: int) -> float:
    """Rise to 1, stay, and fall along a line in the last steps: https://arxiv.org/abs/2404.06395."""
    first = steps - _count(config.decay, steps)
    factor, _ = _warmup(config, step, steps)
    return factor if step <= first else factor * float(np.interp(step, [first, steps], [1, config.end]))


def inverse_sqrt(config: Any, step: int, steps: int) -> float:
    """Rise to 1 and fall as one over the root of the step: https://arxiv.org/abs/1706.03762."""
    peak = max(_count(config.warmup, steps), 1)
    return min(step / peak, math.sqrt(peak / step))


# ---- optimizers ----

Numbers = Sequence[float]
Arrays = Sequence[Array]


def _adam(config: Any, weight: Array, gradients: Arrays, rates: Numbers, added: float, separate: float) -> Array:
    """Run the steps of https://arxiv.org/abs/1412.6980, with decay added to the gradient or applied separately."""
    (first, second), mean, square = config.betas, np.zeros_like(weight), np.zeros_like(weight)
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        total = gradient + added * weight
        mean, square = first * mean + (1 - first) * total, second * square + (1 - second) * total**2
        scale = np.sqrt(square / (1 - second**step)) + config.eps
        weight = weight - rate * separate * weight - rate * mean / (1 - first**step) / scale
    return weight


def adam(config: Any, weight: Array, gradients: Arrays, rates: Numbers, decay: float) -> Array:
    """Add decay to the gradient."""
    return _adam(config, weight, gradients, rates, decay, 0.0)


def adamw(config: Any, weight: Array, gradients: Arrays, rates: Numbers, decay: float) -> Array:
    """Decay the weight separately: https://arxiv.org/abs/1711.05101."""
    return _adam(config, weight, gradients, rates, 0.0, decay)


def sgd(config: Any, weight: Array, gradients: Arrays, rates: Numbers, decay: float) -> Array:
    """Step along the running sum of gradients, in which earlier gradients count less."""
    momentum = np.zeros_like(weight)
    for gradient, rate in zip(gradients, rates, strict=True):
        total = gradient + decay * weight
        momentum = config.momentum * momentum + total
        weight = weight - rate * (total + config.momentum * momentum if config.nesterov else momentum)
    return weight


def muon(config: Any, weight: Array, gradients: Arrays, rates: Numbers, decay: float) -> Array:
    """Iterate a polynomial of the singular values of a mean gradient: https://kellerjordan.github.io/posts/muon/."""
    rows, columns = weight.shape
    scale = math.sqrt(max(1, rows / columns)) if config.scale == "original" else 0.2 * math.sqrt(max(rows, columns))
    momentum = np.zeros_like(weight)
    for gradient, rate in zip(gradients, rates, strict=True):
        momentum = config.momentum * momentum + (1 - config.momentum) * gradient
        ahead = config.momentum * momentum + (1 - config.momentum) * gradient if config.nesterov else momentum
        left, values, right = np.linalg.svd(ahead, full_matrices=False)
        values = values / np.linalg.norm(values)
        for _ in range(config.iterations):
            values = sum(factor * values**power for factor, power in zip(COEFFICIENTS, (1, 3, 5), strict=True))
        weight = (1 - rate * decay) * weight - rate * scale * (left * values) @ right
    return weight


# ---- losses ----


def cross_entropy(config: Any, logits: Array, targets: Array) -> float:
    """Sum the negative log probabilities with label smoothing, and add the weighted squares of log-sum-exps."""
    counted = targets != IGNORE_INDEX
    logits, targets = logits[counted].astype(np.float64), targets[counted]
    totals = np.logaddexp.reduce(logits, axis=1)
    expected = logits[np.arange(len(targets)), targets]
    smoothed = (1 - config.label_smoothing) * expected + config.label_smoothing * logits.mean(1)
    return float((totals - smoothed + config.z_loss * totals**2).sum())


def _by_name(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {function.__name__: function for function in functions}


NEXT_TOKEN_KINDS = ("addition", "calculator", "choices", "copy", "documents", "packed", "pairs", "text", "tokens")
"""Kinds of data whose targets are next tokens."""

OF_RUNS: Kinds = {
    "data": dict.fromkeys(NEXT_TOKEN_KINDS, next_tokens),
    "schedule": _by_name(constant, linear, cosine, wsd, inverse_sqrt),
    "optimizer": _by_name(adam, adamw, sgd, muon),
    "loss": _by_name(cross_entropy),
}

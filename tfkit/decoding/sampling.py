"""From logits to the next token: penalty, temperature, top-k, top-p, in the usual order, then a draw.

Top-k: https://arxiv.org/abs/1805.04833, top-p: https://arxiv.org/abs/1904.09751, repetition penalty:
https://arxiv.org/abs/1909.05858. b rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from tfkit.arguments import Limit, Positive, checked
from tfkit.building.initialize import generator_of

GRID = 2**32
"""Draws are multiples of 1 / GRID. This resolves any vocabulary, and a draw times a sum stays below the sum."""
COLDEST = 1e-30
"""Minimum temperature. A lower value chooses the same tokens, but overflows."""


Temperature: TypeAlias = Annotated[float, Limit(minimum=0)]
Share: TypeAlias = Annotated[float, Limit(above=0, maximum=1)]
Penalty: TypeAlias = Annotated[float, Limit(above=0)]


@checked
@dataclass(frozen=True)
class Sampling:
    """The rule by which the next token is chosen.

    Args:
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: only the k likeliest tokens, and those as likely as the last of them.
        top_p: only the likeliest tokens that together reach this probability.
        repetition_penalty: above 1, tokens that have been seen become less likely: positive logits are divided by it,
            negative ones multiplied.

    Raises:
        ValueError: a value is out of its range, or has no effect.
    """

    temperature: Temperature = 0.0
    top_k: Positive | None = None
    top_p: Share | None = None
    repetition_penalty: Penalty = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "repetition_penalty"):  # torch cannot divide by integers beyond 64 bits
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("top_k", "top_p") if self.temperature == 0 else ():
            if getattr(self, name) is not None:
                raise ValueError(f"{name} has no effect at temperature 0, which takes the likeliest token")

    def scores(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Apply penalty, temperature, top-k and top-p to logits [b, V] in at least float32; excluded tokens get -inf.

        `seen` is bool [b, V], True for the tokens to which the repetition penalty applies.
        """
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.repetition_penalty != 1 and seen is not None:
            scores = torch.where(seen, penalized_scores(scores, self.repetition_penalty), scores)
        if self.temperature > 0:
            scores = scores / max(self.temperature, COLDEST)
        if self.top_k is not None:
            scores = top_k(scores, self.top_k)
        if self.top_p is not None:
            scores = top_p(scores, self.top_p)
        return scores


def penalized_scores(scores: Tensor, penalty: float) -> Tensor:
    """Penalize scores [b, V] of tokens that have already occurred."""
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Set all scores [b, V] below the k-th largest of their row to -inf."""
    threshold = scores.topk(min(k, scores.size(-1))).values[:, -1:]
    return scores.masked_fill(scores < threshold, -math.inf)


def top_p(scores: Tensor, p: float) -> Tensor:
    """Set the scores [b, V] of the least likely tokens to -inf, as many as have at most 1 - p in total.

    Among equal scores, the first tokens are excluded first, in batches of every size.
    """
    ascending, order = scores.sort(dim=-1, stable=True)
    out = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - p
    out[:, -1] = False  # rounding must not exclude all tokens of a row
    return scores.masked_fill(torch.zeros_like(out).scatter(1, order, out), -math.inf)


class Draws:
    """Random numbers from 0 to 1 of each row; samples of a prompt are adjacent rows.

    The numbers of a row depend only on the seed and the indices of its prompt and its sample: additional prompts or
    samples do not change them. They are drawn on the CPU, so they are equal on all devices.
    """

    def __init__(self, prompts: range, n_samples: int, *, seed: int, device: torch.device) -> None:
        self._device = device
        self._generators = [
            generator_of(seed, f"{prompt}/{sample}", "cpu") for prompt in prompts for sample in range(n_samples)
        ]

    def __call__(self, n: int) -> Tensor:
        """Return the next `n` numbers of each row, [b, n]."""
        draws = [torch.randint(GRID, (n,), generator=generator, device="cpu") for generator in self._generators]
        return (torch.stack(draws).double() / GRID).to(self._device)


class Sampler:
    """Chooses the next token of each row, for at most `steps` steps; samples of a prompt are adjacent rows.

    The random numbers of a row do not depend on the number of steps. They are drawn before the first step, so no step
    waits for them.
    """

    def __init__(
        self, sampling: Sampling, prompts: range, n_samples: int, steps: int, *, seed: int, device: torch.device
    ) -> None:
        self.sampling = sampling
        self._seen: Tensor | None = None
        self._step = 0
        self._draws: Tensor | None = None
        if sampling.temperature > 0:
            self._draws = Draws(prompts, n_samples, seed=seed, device=device)(steps)

    def read(self, tokens: Tensor, mask: Tensor | None, vocab_size: int) -> None:
        """Record tokens [b, t] for the repetition penalty where `mask`, bool [b, t], is True; by default all."""
        if self.sampling.repetition_penalty == 1:
            return
        if self._seen is None:  # with a place for padding
            self._seen = torch.zeros(tokens.size(0), vocab_size + 1, dtype=torch.bool, device=tokens.device)
        self._seen.scatter_(1, tokens if mask is None else tokens.masked_fill(~mask, vocab_size), True)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the next tokens, [b], from logits [b, V]."""
        scores = self.sampling.scores(logits, None if self._seen is None else self._seen[:, :-1])
        tokens = scores.argmax(dim=-1) if self._draws is None else drawn_tokens(scores, self._draws[:, self._step])
        self._step += 1
        self.read(tokens[:, None], None, logits.size(-1))
        return tokens


def drawn_tokens(scores: Tensor, draws: Tensor) -> Tensor:
    """Return the token of each row, [b], at which the cumulative probability of scores [b, V] first exceeds draws [b].

    The sum is in float64, where the many small probabilities of a large vocabulary are not lost.
    """
    sums = scores.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    tokens = torch.searchsorted(sums, draws[:, None] * sums[:, -1:], right=True)
    return tokens.squeeze(1).clamp(max=scores.size(-1) - 1)  # NaN logits give an index beyond the last token

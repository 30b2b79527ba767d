"""Generation by masked diffusion, as in LLaDA: https://arxiv.org/abs/2502.09992, algorithms 4 and 5.

An answer begins as mask tokens. Each forward predicts all of them, and some of the predictions stay. b rows, t
positions, n positions of a block, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from tfkit.arguments import Natural, Positive, checked
from tfkit.decoding.sampling import Draws, Sampling, drawn_tokens
from tfkit.graph.decode_split import split_if_decodable
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import rows_of

Remasking: TypeAlias = Literal["low_confidence", "random"]


@checked
@dataclass(frozen=True)
class MaskedDiffusion:
    """Generation of tokens by a model that predicts masked tokens, as the loss `masked_diffusion` trains it.

        way = tfkit.MaskedDiffusion(mask_token=65, steps=16, block_length=8)
        result = tfkit.generate(model, [[1, 2, 3], [4]], max_new_tokens=32, generation=way)

    Args:
        mask_token: the token that stands for a masked position.
        steps: maximum number of forwards for an answer; by default, each forward reveals a single token. The blocks of
            an answer share the steps equally, and so do the tokens of a block. If they cannot be equal, the first ones
            get more.
        block_length: number of tokens of a block. A block begins when the blocks before it are complete; by default,
            the answer is a single block.
        remasking: the predictions that a step keeps: those with the highest probability, or random ones.

    Raises:
        ValueError: a value is out of its range.
    """

    mask_token: Natural
    steps: Positive | None = None
    block_length: Positive | None = None
    remasking: Remasking = "low_confidence"

    def input_of(self, graph: Graph) -> str:
        """Return the input that takes the tokens; raise ValueError for a model that cannot fill in masked tokens."""
        names = [name for name, signal in graph.inputs.items() if signal.type == "tokens"]
        if len(names) != 1:
            raise ValueError(f"masked diffusion must have a model with a single input of tokens; got {len(names)}")
        any_length = {name: replace(signal, length=None) for name, signal in graph.inputs.items()}
        if split_if_decodable(replace(graph, inputs=any_length)) is not None:
            message = "masked diffusion must have a model that attends to later tokens, such as an encoder"
            raise ValueError(f"{message}; `{graph.name}` predicts each token from the tokens before it")
        rows = rows_of(graph, names[0])
        if rows is not None and self.mask_token >= rows:
            message = f"the mask token must be an id of the vocabulary of `{graph.name}`, 0 to {rows - 1}"
            raise ValueError(f"{message}; got {self.mask_token}")
        return names[0]

    def counts(self, length: int) -> list[list[int]]:
        """Return the number of tokens that each step reveals, for each block of an answer of `length` tokens."""
        size = self.block_length or length
        sizes = [min(size, length - start) for start in range(0, length, size)]
        if self.steps is None:
            return [[1] * size for size in sizes]
        if self.steps < len(sizes):
            message = f"`steps` must be at least the number of blocks, {len(sizes)} for {length} tokens in blocks of"
            raise ValueError(f"{message} {size}; got {self.steps}")
        steps = _equal_parts(self.steps, len(sizes))
        return [_equal_parts(size, min(size, count)) for size, count in zip(sizes, steps, strict=True)]

    def blocks(
        self, logits_of: Callable[[Tensor], Tensor], prompt: Tensor, length: int, sampling: Sampling, draws: Draws
    ) -> Iterator[Tensor]:
        """Yield the tokens of each block, [b, n], of answers to prompts [b, t]; `logits_of` returns logits [b, t, V].

        The numbers of `draws` belong to the positions of a block: in each step first for its tokens, if they are
        sampled, and then for their order, if it is random.
        """
        tokens = F.pad(prompt, (0, length), value=self.mask_token)
        start = prompt.size(1)
        for counts in self.counts(length):
            block = tokens[:, start : start + sum(counts)]  # a view: new tokens are in `tokens`
            masked = torch.ones_like(block, dtype=torch.bool)
            for count in counts:
                logits = logits_of(tokens)[:, start : start + block.size(1)]
                candidates, confidence = self._predicted(logits, sampling, draws)
                # Stable: of equal values, the first positions are kept.
                order = confidence.masked_fill(~masked, -math.inf).argsort(dim=1, descending=True, stable=True)
                revealed = torch.zeros_like(masked).scatter(1, order[:, :count], True)
                block.copy_(torch.where(revealed, candidates, block))
                masked &= ~revealed
            yield block.clone()
            start += block.size(1)

    def _predicted(self, logits: Tensor, sampling: Sampling, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return the predicted tokens [b, n] from logits [b, n, V], and the confidence in each."""
        b, n, v = logits.shape
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        if self.mask_token < v:
            scores = scores.index_fill(1, torch.tensor([self.mask_token], device=scores.device), -math.inf)
        if sampling.temperature == 0:
            tokens = scores.argmax(dim=-1)
        else:
            tokens = drawn_tokens(sampling.scores(scores), draws(n).flatten())
        if self.remasking == "random":
            return tokens.view(b, n), draws(n)
        return tokens.view(b, n), scores.softmax(dim=-1).gather(1, tokens[:, None]).view(b, n)


def _equal_parts(total: int, count: int) -> list[int]:
    """Return `count` integers that differ by at most 1 and add up to `total`, the largest first."""
    quotient, remainder = divmod(total, count)
    return [quotient + (index < remainder) for index in range(count)]

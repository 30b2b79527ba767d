"""The random numbers of a run: each a pure function of the seed, the name of its stream, and the step.

So a step can be made again, in another process or after a crash, without any state of a generator. Streams are apart:
an evaluation cannot change what training draws. https://doi.org/10.1145/2063384.2063405
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from tfkit.run.contract import Ids, Order
from tfkit.run.step_values import StepValues


def stream_seed(seed: int, stream: str, *keys: int) -> int:
    """Return a seed for torch, from 0 to 2**63 - 1, independent for each stream and key."""
    text = "/".join([str(seed), stream, *map(str, keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def stream_generator(seed: int, stream: str, *keys: int) -> np.random.Generator:
    """Return a random generator that is independent for each stream and key."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(stream_seed(seed, stream, *keys))))


def indices_of(order: Order, seed: int, step: int, sizes: StepValues[int], *, examples: int) -> Ids:
    """Return the indices of the examples of a step; the first step is 1. `sizes` are the examples of each step."""
    if order == "sampled":
        return stream_generator(seed, "data", step).integers(0, examples, size=sizes.value(step))
    locations = np.arange(sizes.before(step), sizes.before(step + 1))
    if order == "sequential":
        return locations % examples
    epochs, within = np.divmod(locations, examples)
    return np.concatenate(
        [_shuffled_indices(seed, int(number), examples)[within[epochs == number]] for number in np.unique(epochs)]
    )


def indices_to_evaluate(split: str, number: int, *, sequences: int, examples: int) -> Ids:
    """Return the indices of the examples in batch `number` of an evaluation.

    The indices are the same for all runs, so runs are comparable.
    """
    return stream_generator(0, f"evaluation/{split}", number).integers(0, examples, size=sequences)


@lru_cache(maxsize=2)
def _shuffled_indices(seed: int, number: int, examples: int) -> Ids:
    """Return the order of all examples in one epoch."""
    return stream_generator(seed, "data", number).permutation(examples)

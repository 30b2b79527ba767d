"""The keys that new tokens attend to in a cache, and the slots that new tokens take.

Token p has slot p modulo the number of slots, so a full cache and the ring of a sliding window are the same thing, and
the positions of keys follow from the slot and the newest position. Where new tokens would overwrite keys that other
tokens of the step attend to, old slots and new tokens are read together before anything is written (`place`). Padding
has neither slot nor position, so each sequence of a batch behaves as if it were alone.
"""

# Annotations are evaluated, because TorchScript does not resolve the string annotations of a `NamedTuple`.
from typing import NamedTuple

import torch
from torch import Tensor

from tfkit.nn import Cache, Past


class CachedKeys(NamedTuple):
    """New tokens, and the keys that they attend to in a cache.

    Attributes:
        queries: positions of the new tokens, [b or 1, q].
        keys: positions of the keys, [b or 1, k]; an empty slot has a negative position.
        tokens: True where a key is a token, [b, k]; None if all are.
        length: columns that the cache has room for.
        cache: slots of the new tokens; the tensors of a layer are added later.
    """

    queries: Tensor
    keys: Tensor
    tokens: Tensor | None
    length: int
    cache: Cache


def place(queries: Tensor, padding: Tensor | None, past: Past, n_slots: int | None) -> CachedKeys:
    """Return the slots of new tokens at positions `queries` [b or 1, t], and the keys that they attend to.

    `padding` is True at tokens, [b, t]. Each cache has `n_slots`, and one for padding; None for a cache of states.
    """
    tensors: list[Tensor] = []
    if n_slots is None:
        return CachedKeys(queries, queries, padding, past.length, Cache(tensors, queries, 0, 0))
    t, ragged = queries.size(1), padding is not None or past.lengths is not None
    slots = torch.remainder(queries, n_slots)
    if ragged:
        stays = queries > queries[:, -1:] - n_slots
        stays = stays if padding is None else stays & padding.to(torch.bool)
        slots = torch.where(stays, slots, n_slots)
    else:
        slots = slots[0, max(0, t - n_slots) :]
    keys, tokens, before, after = queries, padding, 0, 0
    if past.start > 0 and (past.start + t <= n_slots or t == 1):
        after = min(past.start + t, n_slots)
        keys = held(queries[:, -1:], after, n_slots)
        tokens = keys >= 0 if ragged else None
    elif past.start > 0:
        before = min(past.start, n_slots)
        lengths = past.lengths
        last = torch.full((1, 1), past.start, device=queries.device) if lengths is None else lengths[:, None]
        old = held(last - 1, before, n_slots).expand(queries.size(0), -1)
        keys = torch.cat((old, queries), dim=1)
        if ragged:
            new = torch.ones_like(queries, dtype=torch.bool) if padding is None else padding.to(torch.bool)
            tokens = torch.cat((old >= 0, new), dim=1)
    return CachedKeys(queries, keys, tokens, past.length, Cache(tensors, slots, before, after))


def held(last: Tensor, n: int, n_slots: int) -> Tensor:
    """Return the positions of the tokens in the first `n` slots after `last` [b or 1, 1] is written, or negative."""
    slots = torch.arange(n, device=last.device)
    return last - torch.remainder(last - slots, n_slots)

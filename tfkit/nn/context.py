"""What attention receives besides x, and its cache of the tokens that it has read.

Annotations are evaluated here, because TorchScript does not resolve those of a `NamedTuple` that are text.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Past(NamedTuple):
    """How much of each sequence was read before, when sequences are read in pieces.

    Attributes:
        start: columns read before, padding among them: no sequence has more tokens than these.
        length: columns that the caches are made for.
        lengths: tokens read before, by sequence, int [b]; None where that is `start` for all.
    """

    start: int
    length: int
    lengths: Tensor | None


class Cache(NamedTuple):
    """What one attention cached of each token, where the new tokens go, and what is read.

    There are three cases. At the start, only the new tokens are read: `before` and `after` are 0. Where the slots hold
    all that may be read, old and new, `after` of them are read once the new tokens are written. Where new tokens
    overwrite what others of them still read, `before` of the slots are read together with the new tokens.
    `tfkit.update_cache` does all of it.

    Attributes:
        tensors: in the order of its config's `cached`, [b, heads, slots + 1, width] each, where the last slot takes
            what padding would write. In cross-attention [b, heads, k, width], a slot for each
            position of the memory.
        slots: the slots of the last so many new tokens: int [t], or [b, t] where they differ by sequence.
        before: slots that are read together with the new tokens.
        after: slots that are read once the new tokens are written.
    """

    tensors: list[Tensor]
    slots: Tensor
    before: int
    after: int


class Context(NamedTuple):
    """What attention receives besides x [b, q, d_model]. Computed once per forward by the stack, for all layers alike.

    b batch, h heads, q queries (the new tokens), k keys (all tokens that are read, those in the cache among them).
    docs/attention.md shows an attention that is written against it.

    Attributes:
        mask: which keys a query reads, [b or 1, h or 1, q or 1, k]: bool, True to read, or in the type of x, added to
            the scores: minus infinity hides a key, and the biases of positions (alibi, t5) stand in it. None hides
            nothing, or only later keys where the module was built with `causal`.
        rotary: the table of the rotary positions of the new tokens, as the config in `position` makes it: the rotation
            that it builds takes it. None without rotary positions, and in cross-attention.
        memory: the sequence that cross-attention reads, [b, k, d_memory]; None in self-attention, and once cached.
        cache: of the tokens that came before; None where sequences are read whole.
        temperature: what multiplies the queries, by their positions, [b or 1, 1, q, 1]; None unless the config has a
            `temperature`.
    """

    mask: Tensor | None
    rotary: Tensor | None
    memory: Tensor | None
    cache: Cache | None = None
    temperature: Tensor | None = None


def count_positions(x: Tensor, mask: Tensor | None, past: Past | None) -> Tensor:
    """Positions of the tokens x [b, t, ...], counted over those that are not padding, [b or 1, t].

    Padding has the position of the token in front of it, or one less than the first.
    """
    if mask is None:
        positions = torch.arange(x.size(1), device=x.device)[None]
    else:
        positions = mask.long().cumsum(dim=1) - 1
    if past is None:
        return positions
    lengths = past.lengths
    return positions + past.start if lengths is None else positions + lengths[:, None]


def update_cache(new: Tensor, context: Context, index: int) -> Tensor:
    """Cache what self-attention computed of the new tokens, and return it for all tokens that it reads.

    Args:
        new: [b, heads, t, width], for instance the rotated keys.
        context: of this forward; without a cache, `new` comes back.
        index: which of the cache's tensors it is, as in `cached`.

    Returns:
        [b, heads, k, width], with the keys in the order of the mask's last axis. That is the order of the slots: what
        depends on the order of tokens belongs in the mask.
    """
    cache = context.cache
    if cache is None:
        return new
    slots = cache.tensors[index]
    seen = new = new.to(slots.dtype)
    if cache.before > 0:
        seen = torch.cat((slots[:, :, : cache.before], new), dim=2)
    count = cache.slots.size(-1)
    written = new if count == new.size(2) else new[:, :, -count:]
    if cache.slots.dim() == 1:
        slots.index_copy_(2, cache.slots, written)
    else:
        rows = torch.arange(slots.size(0), device=slots.device)[:, None]
        slots.transpose(1, 2).index_put_((rows, cache.slots), written.transpose(1, 2))
    return seen if cache.after == 0 else slots[:, :, : cache.after]


def cache_of_layer(context: Context, caches: list[list[Tensor]] | None, layer: int) -> Context:
    """The context of one layer: what all share, and the tensors that it cached."""
    cache = context.cache
    if cache is None or caches is None:
        return context
    own = Cache(caches[layer], cache.slots, cache.before, cache.after)
    return Context(context.mask, context.rotary, context.memory, own, context.temperature)


def cache_of_next(context: Context, before: int) -> Context:
    """The context of a further attention in a layer: its tensors come after `before` others."""
    cache = context.cache
    if cache is None:
        return context
    return cache_of_layer(context, [cache.tensors[before:]], 0)

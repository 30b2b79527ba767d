"""What attention receives besides x, and what it keeps of the tokens that it has read.

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
    """What one attention keeps of each token, where the new tokens go, and what is read.

    There are three cases. At the start, the new tokens alone are read: `before` and `after` are 0. Where the slots hold
    all that may be read, old and new, `after` of them are read once the new tokens are written. Where new tokens
    overwrite what others of them still read, `before` of the slots are read together with the new tokens.
    `tfkit.remember` does all of it.

    Attributes:
        tensors: what the attention keeps, in the order of its config's `kept`; [b, heads, slots + 1, width] each, where
            the last slot takes what padding would write. In cross-attention [b, heads, k, width], a slot for each
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
        cache: what is kept of each token; None where sequences are read whole.
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


def remember(new: Tensor, context: Context, index: int) -> Tensor:
    """Keep what self-attention computed of the new tokens, and return it for all tokens that it reads.

    Args:
        new: [b, heads, t, width], for instance the rotated keys.
        context: of this forward; without a cache, `new` comes back.
        index: which of the cache's tensors it is, as in `kept`.

    Returns:
        [b, heads, k, width], with the keys in the order of the mask's last axis. That is the order of the slots: what
        depends on the order of tokens belongs into the mask.
    """
    cache = context.cache
    if cache is None:
        return new
    kept = cache.tensors[index]
    seen = new = new.to(kept.dtype)
    if cache.before > 0:
        seen = torch.cat((kept[:, :, : cache.before], new), dim=2)
    count = cache.slots.size(-1)
    written = new if count == new.size(2) else new[:, :, -count:]
    if cache.slots.dim() == 1:
        kept.index_copy_(2, cache.slots, written)
    else:
        rows = torch.arange(kept.size(0), device=kept.device)[:, None]
        kept.transpose(1, 2).index_put_((rows, cache.slots), written.transpose(1, 2))
    return seen if cache.after == 0 else kept[:, :, : cache.after]


def own(context: Context, tensors: list[Tensor] | None, first: int, count: int) -> Context:
    """The context of one layer: its own `count` tensors, from `first` on, in place of all layers'."""
    cache = context.cache
    if cache is None or tensors is None:
        return context
    part = Cache(tensors[first : first + count], cache.slots, cache.before, cache.after)
    return Context(context.mask, context.rotary, context.memory, part, context.temperature)


def later(context: Context, first: int) -> Context:
    """The context of a further attention in the same layer: its tensors come behind the `first` ones."""
    cache = context.cache
    if cache is None:
        return context
    return own(context, cache.tensors, first, len(cache.tensors) - first)

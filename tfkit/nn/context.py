"""The inputs of a sublayer besides x, and its cache of the tokens that it has read.

Annotations are evaluated here, because TorchScript does not resolve the string annotations of a `NamedTuple`.

A step of decoding runs in one of two ways. Without padding, lengths are Python numbers: slices, no mask for a single
token, the fast path of scaled dot-product attention. With padding, or compiled, lengths are a tensor, all slots are
read and a mask hides the empty slots: no shape changes, and one compilation serves all tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tfkit.nn.checked import is_pairwise


class Past(NamedTuple):
    """The part of each sequence that was read before, when sequences are read step by step.

    Attributes:
        start: columns read before, padding included: the most tokens that any sequence has.
        length: columns that the caches have room for.
        lengths: tokens read before, by sequence, int [b]; None if that is `start` for all.
    """

    start: int
    length: int
    lengths: Tensor | None


class Cache(NamedTuple):
    """The tensors that a sublayer keeps of earlier tokens, the slots for the new tokens, and the slots that are read.

    There are three cases. At the start, only the new tokens are read: `before` and `after` are 0. If the slots hold
    everything that may be read, old and new, `after` of them are read once the new tokens are written. If new tokens
    overwrite slots that other new tokens still read, `before` of the slots are read together with the new tokens.
    `tfkit.update_cache` does all of it.

    Attributes:
        tensors: in the order of its config's `cached`. With slots of tokens [b, heads, slots + 1, width], where padding
            is written to the last slot. A state is [b, heads, rows, width]. In cross-attention [b, heads, k, width], a
            slot for each position of the memory.
        slots: the slots of this many last new tokens: int [t], or [b, t] if they differ by sequence.
        before: slots that are read together with the new tokens.
        after: slots that are read once the new tokens are written.
    """

    tensors: list[Tensor]
    slots: Tensor
    before: int
    after: int


class Context(NamedTuple):
    """The inputs of a sublayer besides x [b, q, d_model], computed by the stack once per forward for all layers.

    b batch, h heads, q queries (the new tokens), k keys (all tokens that are read, including those in the cache).
    docs/attention.md shows an attention that uses it, docs/mixers.md a mixer.

    Attributes:
        mask: the keys that a query reads, [b or 1, h or 1, q or 1, k]: bool, True to read; or in the type of x, added
            to the scores: minus infinity hides a key, and the biases of positions (alibi, t5) are part of it. None
            hides nothing, or only later keys if the module was built with `causal`.
        rotary: the table of the rotary positions of the new tokens, made by the config in `position`, for the rotation
            that this config builds. None without rotary positions, and in cross-attention.
        memory: the sequence that cross-attention reads, [b, k, d_memory]; None in self-attention, and once cached.
        cache: of the tokens that came before; None if sequences are read as a whole.
        temperature: factors of the queries, by their positions, [b or 1, 1, q, 1]; None unless the config has a
            `temperature`.
        padding: bool [b, t], True at tokens, in the order of `order_tokens`: the tokens of each row come first. None if
            there is no padding, and in a stack without mixers.
        order: the index of each position in that order, [b, t]; None with `padding`.
        documents: a number for the document of each position in that order, [b, t]: the positions of a document are
            neighbours. None in rows of a single document.
        condition: the vector of the stack's `condition`, [b, width]; None without, and in cross-attention.
        relative: rows for classes of distances, [1, n, d_model], and the index of the row of each query and key, int
            [b or 1, q, k]; None unless the position is a `ContentScoreConfig`, such as disentangled.
        wires: tensors that earlier sublayers gave, by name: docs/wires.md. None in a stack in which no sublayer takes a
            wire, and in cross-attention.
        features: the layer's part of the stack's `layer_features`, [b, t, width]; None without, and in cross-attention.
        key_positions: positions of the keys, int [b or 1, k], if a sliding window has a cache: its slots are a ring.
            None if the last axis of the mask is in the order of positions.
    """

    mask: Tensor | None
    rotary: Tensor | None
    memory: Tensor | None
    cache: Cache | None = None
    temperature: Tensor | None = None
    padding: Tensor | None = None
    order: Tensor | None = None
    documents: Tensor | None = None
    condition: Tensor | None = None
    relative: tuple[Tensor, Tensor] | None = None
    wires: dict[str, Tensor] | None = None
    features: Tensor | None = None
    key_positions: Tensor | None = None


def with_values(
    context: Context,
    cache: Cache | None = None,
    padding: Tensor | None = None,
    order: Tensor | None = None,
    documents: Tensor | None = None,
    condition: Tensor | None = None,
    wires: dict[str, Tensor] | None = None,
    features: Tensor | None = None,
) -> Context:
    """Return the context with these values; None changes nothing."""
    return Context(
        context.mask,
        context.rotary,
        context.memory,
        context.cache if cache is None else cache,
        context.temperature,
        context.padding if padding is None else padding,
        context.order if order is None else order,
        context.documents if documents is None else documents,
        context.condition if condition is None else condition,
        context.relative,
        context.wires if wires is None else wires,
        context.features if features is None else features,
        context.key_positions,
    )


def with_wires(context: Context, wires: dict[str, Tensor]) -> Context:
    """Return the context of the sublayers after one that gave these wires."""
    together = wires_of(context).copy()
    together.update(wires)
    return with_values(context, wires=together)


def wires_of(context: Context) -> dict[str, Tensor]:
    """Return the wires that the sublayers so far gave."""
    wires = context.wires
    assert wires is not None
    return wires


def rotary_of(context: Context) -> Tensor:
    """Return the table of the rotary positions."""
    table = context.rotary
    assert table is not None
    return table


def token_order(mask: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return `padding`, `order` and `documents` of a `Context`, from a mask [b, t] that is True at tokens.

    A pairwise mask also has the documents: the document of a token begins with the first token that it may attend to.
    """
    documents: Tensor | None = None
    length = mask.size(1)
    columns = torch.arange(length, device=mask.device)
    if is_pairwise(mask):
        real = mask.diagonal(dim1=1, dim2=2)
        first = torch.where(real, mask.to(torch.uint8).argmax(dim=2), length)
        order = torch.argsort(first * length + columns, dim=1)
        documents = first.gather(1, order)
        return columns < real.sum(dim=1, keepdim=True), order.argsort(dim=1), documents
    tokens = mask.long().cumsum(dim=1)
    count = tokens[:, -1:]
    return columns < count, torch.where(mask, tokens - 1, count + columns - tokens), documents


def order_tokens(x: Tensor, context: Context) -> Tensor:
    """Move padding behind the tokens of each row of x [b, t, width], which keep their order."""
    order = context.order
    return x if order is None else torch.zeros_like(x).scatter(1, order[:, :, None].expand_as(x), x)


def restore_order(x: Tensor, context: Context) -> Tensor:
    """Move the positions of x [b, t, width] from the order of `order_tokens` back to the order of the sequence."""
    order = context.order
    return x if order is None else x.gather(1, order[:, :, None].expand_as(x))


def count_positions(x: Tensor, mask: Tensor | None, past: Past | None) -> Tensor:
    """Count the positions of tokens x [b, t, ...] without padding, [b or 1, t].

    Padding has the position of the token before it, or one less than the first. With a mask of pairs, only the tokens
    that a token may read are before it.
    """
    if mask is None:
        positions = torch.arange(x.size(1), device=x.device)[None]
    elif is_pairwise(mask):
        positions = mask.tril().sum(dim=2) - 1
    else:
        positions = mask.long().cumsum(dim=1) - 1
    if past is None:
        return positions
    lengths = past.lengths
    return positions + past.start if lengths is None else positions + lengths[:, None]


def update_cache(new: Tensor, context: Context, index: int) -> Tensor:
    """Cache a tensor that self-attention computed of the new tokens, and return it for all tokens that are read.

    Args:
        new: [b, heads, t, width], for instance the rotated keys.
        context: of this forward; without a cache, `new` is returned.
        index: the number of this tensor in the cache, in the order of `cached`.

    Returns:
        [b, heads, k, width], with the keys in the order of the mask's last axis. That is the order of the slots:
        anything that depends on the order of tokens belongs in the mask.
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
    """Return the context of one layer: the shared context with the layer's cache."""
    cache = context.cache
    if cache is None or caches is None:
        return context
    return with_values(context, Cache(caches[layer], cache.slots, cache.before, cache.after))


def cache_of_next(context: Context, before: int) -> Context:
    """Return the context of a further sublayer of a layer, whose tensors follow `before` others."""
    cache = context.cache
    if cache is None:
        return context
    return cache_of_layer(context, [cache.tensors[before:]], 0)

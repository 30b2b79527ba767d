"""Linear recurrences over tokens, in chunks: a loop over chunks carries the state, and matrix products cover a chunk.

    linear_scan        h_t = a_t h_(t-1) + b_t                              for each channel
    linear_attention   S_t = a_t S_(t-1) + k_t' v_t                         y_t = q_t S_t
    delta_rule         S_t = a_t S_(t-1) + k_t' b_t (v_t - k_t a_t S_(t-1))   y_t = q_t S_t
    running_max        m_t = max(log a_t + m_(t-1), x_t)                    for each head
    decaying_mean      N_t = a N_(t-1) + exp(k_t) v_t, D_t = a D_(t-1) + exp(k_t)   y_t = N_t / D_t, for each channel

The state of one chunk is the start of the next, so no result depends on the size of a chunk or on where a sequence is
cut. All exponents of decays are at most 0: no decay, however fast, overflows. A single token takes the formula above.

A token that must not change the state has a decay of 1 (a logarithm of 0) and writes nothing.

b batch, t positions, c positions of a chunk, h heads, g groups of heads, r heads of a group, n rows and p columns of a
state.

Chunks: https://arxiv.org/abs/2405.21060, section 6; https://arxiv.org/abs/2406.06484, section 3; for a decay of each
row https://arxiv.org/abs/2510.26692, section 3. `decaying_mean` is wkv of https://arxiv.org/abs/2305.13048.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

import tfkit

EMPTY = -1e30


def values_of(cached: Sequence[tfkit.State], width: int) -> dict[str, tfkit.InnerValue]:
    """Return, for `inner_values`, the input of the module `output`, and the state of the recurrence if there is one."""
    values = {"inner": tfkit.InnerValue("output", 0, f"[b, t, {width}]")}
    for index, entry in enumerate(cached):
        if entry.wide:
            shape = f"[b, {entry.heads}, {entry.rows}, {entry.width}]"
            values["state"] = tfkit.InnerValue("", None, shape, state=index)
    return values


def widened(x: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 if it has this dtype: states are summed in these dtypes."""
    return x if x.dtype == torch.float64 else x.float()


def continues(documents: Tensor, distance: int = 1) -> Tensor:
    """Return where a position has the document of the position `distance` before it, bool [b, t]."""
    earlier = torch.zeros_like(documents, dtype=torch.bool)
    earlier[:, distance:] = documents[:, distance:] == documents[:, :-distance]
    return earlier


def document_masks(documents: Tensor, start: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return masks of equal documents between the positions of a chunk, c, and with the position before the chunk.

    Args:
        documents: [b, t].
        start: first position of the chunk.
        size: number of its positions; the last chunk may have fewer.

    Returns:
        bool [b, c, c] for the positions of the chunk, [b, c] for the position before the chunk, and [b, c] for the last
        position of the chunk.
    """
    chunk = documents[:, start : start + size]
    return chunk[:, :, None] == chunk[:, None], chunk == documents[:, max(start - 1, 0), None], chunk == chunk[:, -1:]


def linear_scan(decay: Tensor, write: Tensor, state: Tensor) -> Tensor:
    """Compute all states [b, t, ...] of a recurrence for each channel.

    Args:
        decay: factors of the state, [b, t, ...].
        write: [b, t, ...], added to the state.
        state: [b, ...], before the first token.
    """
    states: list[Tensor] = []
    for factor, addend in zip(decay.unbind(1), write.unbind(1)):  # noqa: B905  TorchScript has no `strict`
        state = torch.addcmul(addend, factor, state)
        states.append(state)
    return torch.stack(states, dim=1)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    chunk: int,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read and write a state that decays by a single factor, for each head.

    Args:
        q: [b, g, t, n], queries. All heads of a group share q and k.
        k: [b, g, t, n], keys: the weights of the rows to which a token writes.
        v: [b, g, r, t, p], values: the vectors that a token writes.
        log_decay: [b or 1, g, r, t], at most 0.
        state: [b, g, r, n, p], before the first token; None if there is none.
        chunk: positions of a chunk.
        documents: the document of each position, [b, t]; the state restarts with each of them.

    Returns:
        [b, g, r, t, p], and the state after the last token.
    """
    length = q.size(2)
    if length == 1:
        written = k.mT[:, :, None] * v
        state = written if state is None else state * log_decay.exp()[..., None] + written
        return q[:, :, None] @ state, state
    outputs: list[Tensor] = []
    # The backward of each slice would allocate the full length; the pieces of a split share a single tensor.
    chunks = zip(q.split(chunk, 2), k.split(chunk, 2), v.split(chunk, 3), log_decay.split(chunk, -1))  # noqa: B905
    for index, (queries, keys, values, decays) in enumerate(chunks):
        total = decays.cumsum(dim=-1)
        between, since, until = decays_between(total), total.exp(), (total[..., -1:] - total).exp()
        if documents is not None:
            same, continued, last = document_masks(documents, index * chunk, chunk)
            between, since = between * same[:, None, None], since * continued[:, None, None]
            until = until * last[:, None, None]
        y = ((queries @ keys.mT)[:, :, None] * between) @ values
        written = keys.mT[:, :, None] @ (until[..., None] * values)
        if state is None:
            state = written
        else:
            y = y + since[..., None] * (queries[:, :, None] @ state)
            state = since[..., -1, None, None] * state + written
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, dim=3), state


def decays_between(total: Tensor) -> Tensor:
    """Return the decay from position j to position i, [..., i, j], from running sums [..., c]; 0 if j is later."""
    size = total.size(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    # Masked before the exponential: afterwards, an infinite decay would make the gradient NaN.
    return (total[..., :, None] - total[..., None, :]).masked_fill(later, -math.inf).exp()


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    chunk: int,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Write the difference between a value and the value that the decayed state stores under its key; read the state.

    Args:
        q: [b, h, t, n], queries.
        k: [b, h, t, n], keys.
        v: [b, h, t, p], values.
        log_decay: [b, h, t, n], at most 0; [b, h, t, 1] if all rows of a state have one decay.
        beta: [b, h, t, 1], the fraction of the difference that is written.
        state: [b, h, n, p], before the first token.
        chunk: positions of a chunk.
        documents: the document of each position, [b, t]; the state restarts with each of them.

    Returns:
        [b, h, t, p], and the state after the last token.
    """
    length = q.size(2)
    if length == 1:
        state = state * log_decay.exp().mT
        state = state + k.mT * (beta * (v - k @ state))
        return q @ state, state
    outputs: list[Tensor] = []
    rates = zip(log_decay.split(chunk, 2), beta.split(chunk, 2))  # noqa: B905  TorchScript has no `strict`
    chunks = zip(q.split(chunk, 2), k.split(chunk, 2), v.split(chunk, 2), rates)  # noqa: B905
    for index, (queries, keys, values, (decays, share)) in enumerate(chunks):
        total = decays.cumsum(dim=2)
        decay, until = total.exp(), (total[:, :, -1:] - total).exp()
        read, overlap = scores_of(queries, keys, total)
        if documents is not None:
            same, continued, last = document_masks(documents, index * chunk, chunk)
            read, overlap = read * same[:, None], overlap * same[:, None]
            decay, until = decay * continued[:, None, :, None], until * last[:, None, :, None]
        # Each token corrects what earlier tokens of the chunk wrote: a triangular system instead of a loop.
        missing = share * (values - (decay * keys) @ state)
        written = torch.linalg.solve_triangular(share * overlap, missing, upper=False, unitriangular=True)
        outputs.append((decay * queries) @ state + read @ written)
        state = decay[:, :, -1:].mT * state + (until * keys).mT @ written
    return torch.cat(outputs, dim=2), state


def scores_of(queries: Tensor, keys: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the decayed products of queries with keys and of keys with keys, [b, h, c, c] each, 0 if later.

    Args:
        queries: [b, h, c, n].
        keys: [b, h, c, n].
        total: running sums of log decays, [b, h, c, n or 1].
    """
    if total.size(3) == 1:
        decay = decays_between(total[..., 0])
        return (queries @ keys.mT) * decay, (keys @ keys.mT) * decay
    decayed = torch.einsum("bhnqk->bhqkn", decays_between(total.mT)) * keys[:, :, None]
    products = decayed @ torch.stack((queries, keys), dim=4)
    return products[..., 0], products[..., 1]


def decaying_mean(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    mean: Tensor,
    weight: Tensor,
    chunk: int,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    empty: float = EMPTY,
) -> tuple[Tensor, Tensor, Tensor]:
    """Average values with the weights exp(k), which decay in each channel; a token weighs more in its output.

    The state is a mean and the logarithm of the sum of its weights. Weights occur only in ratios, so none overflows.
    First, each chunk is averaged alone. A loop over the chunks then carries the state. Finally, a loop over the
    positions of a chunk runs in all chunks at once. There are only t / chunk + chunk sequential steps.

    Args:
        k: [b, t, c], logarithms of weights.
        v: [b, t, c], values.
        log_decay: [c], from -1e26 to 0.
        bonus: [c], added to k of a token in its output, but not in the state.
        mean: [b, c], before the first token.
        weight: [b, c], the logarithm of its weight; `empty` before the first token.
        chunk: positions of a chunk.
        padding: bool [b, t], True at tokens, which come first in each row; None if there is no padding.
        documents: the document of each position, [b, t]; the state restarts with each of them.
        empty: the logarithm of a weight of 0. It is finite: the difference of two infinite logarithms would be NaN.

    Returns:
        [b, t, c], and the mean and the logarithm of its weight after the last token.
    """
    length = k.size(1)
    tokens = torch.ones_like(k[:1, :, :1]) if padding is None else padding[:, :, None].to(k.dtype)
    if padding is not None:  # padding weighs less than nothing, so that it does not even change an empty mean
        k = k.masked_fill(~padding[:, :, None], 2.0 * empty)
    if length == 1:
        y = lerp_by_weight(mean, weight, v[:, 0], k[:, 0] + bonus)
        mean, weight = join(mean, torch.addcmul(weight, tokens[:, 0], log_decay), v[:, 0], k[:, 0])
        return y[:, None], mean, weight
    extra = (chunk - length % chunk) % chunk
    tokens = in_chunks(F.pad(tokens, [0, 0, 0, extra]), chunk)
    restarts: Tensor | None = None
    if documents is not None:
        starts = F.pad(~continues(documents)[:, :, None], [0, 0, 0, extra])
        restarts = empty * in_chunks(starts.to(k.dtype), chunk)
    if extra > 0:
        k, v = F.pad(k, [0, 0, 0, extra], value=2.0 * empty), F.pad(v, [0, 0, 0, extra])
    k, v = in_chunks(k, chunk), in_chunks(v, chunk)
    until, total = decays_until_end(tokens, log_decay, restarts)
    averages, sizes = mean_of_chunks(k + until, v)
    means: list[Tensor] = []
    weights: list[Tensor] = []
    for average, size, decay in zip(averages.unbind(1), sizes.unbind(1), total.unbind(1)):  # noqa: B905
        means.append(mean)
        weights.append(weight)
        mean, weight = join(mean, weight + decay, average, size)
    carried, carried_weight = torch.stack(means, dim=1), torch.stack(weights, dim=1)
    outputs: list[Tensor] = []
    for index, (key, value, token) in enumerate(zip(k.unbind(2), v.unbind(2), tokens.unbind(2))):  # noqa: B905
        if restarts is not None:
            carried_weight = carried_weight + restarts[:, :, index]
        outputs.append(lerp_by_weight(carried, carried_weight, value, key + bonus))
        carried, carried_weight = join(carried, torch.addcmul(carried_weight, token, log_decay), value, key)
    return torch.stack(outputs, dim=2).flatten(1, 2)[:, :length], mean, weight


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """Divide the positions into chunks: [b, t, w] -> [b, n, c, w]."""
    return x.unflatten(1, [-1, chunk])


def decays_until_end(tokens: Tensor, log_decay: Tensor, restarts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return log decays from each position to the end of its chunk, [b, n, c, w], and of entire chunks, [b, n, w].

    Args:
        tokens: [b or 1, n, c, 1], 1 at tokens and 0 at padding, where nothing decays.
        log_decay: [w].
        restarts: [b, n, c, 1], a logarithm that is added before a position is read.
    """
    until = (tokens.sum(dim=2, keepdim=True) - tokens.cumsum(dim=2)) * log_decay
    total = tokens.sum(dim=2) * log_decay
    if restarts is None:
        return until, total
    # Summed from the end: a sum that begins with the restart would lose the smaller decays after it.
    later = restarts[:, :, 1:].flip(2).cumsum(dim=2).flip(2)
    return until + F.pad(later, [0, 0, 0, 1]), total + restarts.sum(dim=2)


def mean_of_chunks(log_weights: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Average values over the positions of each chunk, [b, n, c, w] -> means and logarithms of weights, [b, n, w]."""
    largest = log_weights.detach().amax(dim=2, keepdim=True)
    weights = (log_weights - largest).exp()
    total = weights.sum(dim=2)
    return (weights * v).sum(dim=2) / total, total.log() + largest[:, :, 0]


def lerp_by_weight(mean: Tensor, weight: Tensor, value: Tensor, value_weight: Tensor) -> Tensor:
    """Average a mean and a value, from the logarithms of their weights."""
    return torch.lerp(mean, value, torch.sigmoid(value_weight - weight))


def join(mean: Tensor, weight: Tensor, value: Tensor, value_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the average of a mean and a value, and the logarithm of the sum of their weights."""
    return lerp_by_weight(mean, weight, value, value_weight), torch.logaddexp(weight, value_weight)


def running_max(
    log_decay: Tensor, x: Tensor, start: Tensor, chunk: int, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute m_t = max(a_t + m_(t-1), x_t) for each head.

    Args:
        log_decay: a, [b, h, t], at most 0.
        x: [b, h, t].
        start: m before the first token of a sequence that was read before, [b, h]; each document starts with 0.
        chunk: positions of a chunk.
        documents: the document of each position, [b, t].

    Returns:
        [b, h, t], and the last value.
    """
    if documents is not None:
        x = torch.where(continues(documents)[:, None], x, torch.maximum(x, log_decay))
    results: list[Tensor] = []
    for index, (decays, values) in enumerate(zip(log_decay.split(chunk, 2), x.split(chunk, 2))):  # noqa: B905
        total = decays.cumsum(dim=2)
        before = total + start[:, :, None]
        size = total.size(2)
        later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
        reached = total[..., :, None] - total[..., None, :] + values[..., None, :]
        reached = reached.masked_fill(later, -math.inf)
        if documents is not None:
            same, continued, _ = document_masks(documents, index * chunk, chunk)
            reached = reached.masked_fill(~same[:, None], -math.inf)
            before = before.masked_fill(~continued[:, None], -math.inf)
        largest = torch.maximum(before, reached.amax(dim=3))
        results.append(largest)
        start = largest[:, :, -1]
    return torch.cat(results, dim=2), start

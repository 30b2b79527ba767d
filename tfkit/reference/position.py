"""Positions: added to the embedding, as rotations of queries and keys, or added to scores.

t positions, i pairs of channels, h heads, q queries, k keys, d width of a head.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tfkit.reference.model import Array, Function, Part, rows

# ---- added to the embedding: positions [t] and the width -> [t, width] ----


def learned(part: Part, positions: Array, width: int) -> Array:
    """Look up row position + offset of a table. https://arxiv.org/abs/1705.03122."""
    return rows(part.weight("table.weight"), positions + part.config.offset)


def sinusoidal(part: Part, positions: Array, width: int) -> Array:
    """Compute sines and cosines of position * theta ** (-2 i / width).

    https://arxiv.org/abs/1706.03762, section 3.5.
    """
    config, i = part.config, np.arange(width // 2)
    frequencies = config.theta ** (-2 * i / (width - 2 if config.endpoint else width))
    angles = np.outer(positions + config.offset, frequencies)
    waves = np.stack([np.sin(angles), np.cos(angles)], axis=1 if config.layout == "half" else 2)
    return waves.reshape(len(positions), width)


# ---- rotary: x [t, h, d], positions [t] and the number of keys -> [t, h, d] ----


def rope(part: Part, x: Array, positions: Array, n_keys: int) -> Array:
    """Pair i turns by position * theta ** (-2 i / width). https://arxiv.org/abs/2104.09864."""
    config, width = part.config, part.config.width or x.shape[-1]
    frequencies, factor = config.theta ** (-2 * np.arange(width // 2) / width), 1.0
    if config.scaling is not None:
        frequencies, factor = part.at("scaling", config.scaling)(frequencies, config.theta, n_keys)
    if config.sections is not None and positions.ndim == 2:  # https://arxiv.org/abs/2409.12191, section 2.1
        positions = positions[:, _axes(config.sections, config.interleaved)]
    else:
        positions = positions[:, None]
    angles = (positions * frequencies)[:, None] * (-1 if config.reverse else 1)
    channels = np.arange(width)
    first, second = channels.reshape(2, -1) if config.style == "half" else channels.reshape(-1, 2).T
    cos, sin, y = factor * np.cos(angles), factor * np.sin(angles), x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def _axes(sections: Any, interleaved: bool) -> list[int]:
    """Return the axis of each pair: blocks of pairs, or pairs in turns until the other axes have all of theirs."""
    if not interleaved:
        return [axis for axis in range(len(sections)) for _ in range(sections[axis])]
    axes, n = [0] * sum(sections), len(sections)
    for axis in range(1, n):
        axes[axis : n * sections[axis] : n] = [axis] * len(axes[axis : n * sections[axis] : n])
    return axes


# ---- scaled: frequencies [i], theta and the number of keys -> frequencies, and the factor of cos and sin ----


def ntk(frequencies: Array, factor: float) -> Array:
    """Increase theta until the last pair turns `factor` times slower. https://arxiv.org/abs/2309.00071, section 3.1."""
    return frequencies * factor ** -np.linspace(0, 1, len(frequencies))


def dynamic(part: Part, frequencies: Array, theta: float, n_keys: int) -> tuple[Array, float]:
    """Apply NTK by factor * n_keys / original_max_len - (factor - 1). https://arxiv.org/abs/2309.00071, section 3.3."""
    factor, longer = part.config.factor, max(1.0, n_keys / part.config.original_max_len)
    return ntk(frequencies, factor * longer - (factor - 1)), 1.0


def proportional(part: Part, frequencies: Array, theta: float, n_keys: int) -> tuple[Array, float]:
    """Set the frequencies of the pairs after the first `width` channels to 0."""
    return np.where(2 * np.arange(len(frequencies)) < part.config.width, frequencies, 0), 1.0


def llama3(part: Part, frequencies: Array, theta: float, n_keys: int) -> tuple[Array, float]:
    """Keep short waves and stretch long waves. https://arxiv.org/abs/2407.21783, section 3.4.1."""
    config = part.config
    waves = config.original_max_len * frequencies / (2 * math.pi)
    share = np.clip((waves - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor), 0, 1)
    return frequencies * (share + (1 - share) / config.factor), 1.0


def yarn(part: Part, frequencies: Array, theta: float, n_keys: int) -> tuple[Array, float]:
    """Stretch pairs by a ramp between the pairs that turn `beta_fast` and `beta_slow` times, and scale scores.

    https://arxiv.org/abs/2309.00071, sections 3.2 and 3.4.
    """
    config, width = part.config, 2 * len(frequencies)
    turns = np.array([config.beta_fast, config.beta_slow])
    low, high = width * np.log(config.original_max_len / (2 * math.pi * turns)) / (2 * math.log(theta))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    stretched = np.clip((np.arange(width // 2) - low) / ((high - low) or 0.001), 0, 1)
    scales = np.array([config.mscale or 1, config.mscale_all_dim or 0])
    growth, divisor = 0.1 * scales * math.log(max(config.factor, 1)) + 1
    return frequencies * (1 - stretched + stretched / config.factor), config.temperature or growth / divisor


def longrope(part: Part, frequencies: Array, theta: float, n_keys: int) -> tuple[Array, float]:
    """Divide each frequency by a factor that depends on the length, and scale. https://arxiv.org/abs/2402.13753."""
    config = part.config
    divisors = config.short_factor if n_keys <= config.original_max_len else config.long_factor
    by_default = math.sqrt(1 + math.log(max(config.factor or 1, 1)) / math.log(config.original_max_len))
    return frequencies / np.array(divisors), config.temperature or by_default


# ---- added to scores: the config of the attention, positions [t], causal -> [h, q, k] ----


def alibi(part: Part, attention: Any, positions: Array, causal: bool) -> Array:
    """Compute -slope * |distance|; beyond a power of two of heads, use every other slope of twice that number.

    https://arxiv.org/abs/2108.12409.
    """
    n = 2 ** int(math.log2(attention.n_heads))
    exponents = [*range(2, 2 * n + 1, 2), *range(1, 2 * n, 2)][: attention.n_heads]
    slopes = 2.0 ** (-part.config.max_slope_exponent * np.array(exponents) / (2 * n))
    if part.config.scaled:
        slopes /= math.sqrt(attention.d_head or attention.d_model // attention.n_heads)
    return -slopes[:, None, None] * np.abs(positions - positions[:, None])


def t5(part: Part, attention: Any, positions: Array, causal: bool) -> Array:
    """Return a learned bias for each bucket of distances. https://arxiv.org/abs/1910.10683, section 2.1.

    Each short distance has a separate bucket; buckets then grow up to max_distance. Half of them are for later keys.
    """
    config, ahead = part.config, positions - positions[:, None]
    n = config.n_buckets if causal else config.n_buckets // 2
    first, distance = (0, np.maximum(-ahead, 0)) if causal else (n * (ahead > 0), np.abs(ahead))
    exact = n // 2
    wider = np.log(np.maximum(distance, exact) / exact) / math.log(config.max_distance / exact) * (n - exact)
    bucket = np.where(distance < exact, distance, np.minimum(exact + wider.astype(int), n - 1))
    return part.weight("buckets.weight")[first + bucket].transpose(2, 0, 1)


# ---- content: attention's part, queries [h, q, d], keys [h, k, d], positions [t], causal, projection -> [h, q, k] ----


def disentangled(
    part: Part, attention: Part, q: Array, k: Array, positions: Array, causal: bool, project: Function
) -> Array:
    """Add products with a row for each distance, clipped or in logarithmic buckets.

    The rows of negative distances are those for later keys, which only attention that is not causal has.

    https://arxiv.org/abs/2006.03654, section 3.1; buckets and shared projections: https://arxiv.org/abs/2111.09543.
    """
    config, distance = part.config, positions[:, None] - positions
    rows, n = part.at("norm", config.norm)(part.weight("table.weight")), config.n_buckets or config.max_distance
    if config.n_buckets is not None:
        near = n // 2
        growth = np.log(np.maximum(np.abs(distance), near) / near) / math.log((config.max_distance - 1) / near)
        distant = near + np.ceil(growth * (near - 1)).astype(int)
        distance = np.where(np.abs(distance) > near, np.sign(distance) * distant, distance)
    later = 0 if causal else n
    index, scores = np.clip(distance, -later, n - 1) + later, np.zeros((len(q), len(distance), len(distance)))
    d, biases = q.shape[2], attention.config.biases
    scale = (d * (1 + len(config.terms))) ** -0.5 if attention.config.scale is None else attention.config.scale
    row_q, row_k = project(rows)[:2] if config.shared else (rows, rows)
    for term in config.terms:
        name, side = ("k", row_k) if term == "c2p" else ("q", row_q)
        if not config.shared:
            side = attention.at(f"relative_project.{name}").linear(rows, getattr(biases, name))
        rows_by_head, keys = (
            np.repeat(heads, len(q) // len(heads), axis=0)
            for heads in (side.reshape(len(rows), -1, d).swapaxes(0, 1)[:, index], k)  # [h, q, k, d], [h, k, d]
        )
        if term == "c2p":
            scores += scale * np.einsum("hqd,hqkd->hqk", q, rows_by_head)
        else:
            scores += scale * np.einsum("hkd,hqkd->hqk", keys, rows_by_head)
    return scores


POSITIONS: dict[str, Function] = {
    function.__name__: function for function in (learned, sinusoidal, rope, alibi, t5, disentangled)
}
ROPE_SCALINGS: dict[str, Function] = {
    # positions are divided by the factor: https://arxiv.org/abs/2306.15595
    "linear": lambda part, frequencies, theta, n_keys: (frequencies / part.config.factor, 1.0),
    "ntk": lambda part, frequencies, theta, n_keys: (ntk(frequencies, part.config.factor), 1.0),
    **{function.__name__: function for function in (dynamic, proportional, llama3, yarn, longrope)},
}

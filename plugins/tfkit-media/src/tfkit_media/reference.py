"""Definitions of the blocks in NumPy, independent of their modules: functions for `tfkit.reference`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfkit.reference import Part, Scope, Value


def unmasked(x: Any) -> Value:
    """Return a sequence [t, m] without padding."""
    return Value(x, np.ones((len(x), len(x)), bool))


def patches(part: Part, *, input: Value) -> Value:
    """Project each patch of an image [c, height, width]. https://arxiv.org/abs/2010.11929, section 3.1."""
    config, image, p = part.config, input.x, part.config.size
    (down, right), (rows, columns) = config.strides, config.grid(*image.shape[1:])
    image = np.repeat(image, config.frames, axis=0)  # each channel of a frame next to the same channel of the others
    corners = [(i * down, j * right) for i in range(rows) for j in range(columns)]
    pixels = [image[:, i : i + p, j : j + p].ravel() for i, j in corners]
    x = part.at("project").linear(np.stack(pixels), config.bias)
    names = ["class_token"] * config.class_token + ["distillation_token"] * config.distillation_token
    front = [part.weight(f"{name}.weight")[0] for name in names]
    x = np.concatenate([np.reshape(front, (len(front), config.d_model)), x])
    if config.position == "learned":
        table = part.weight("position.weight")
        learned = config.grid(config.learned_height or image.shape[1], config.learned_width or image.shape[2])
        grid = table[len(front) :].reshape(*learned, -1)
        for axis, size in enumerate((rows, columns)):
            if learned != (rows, columns):
                weights = resizing(learned[axis], size, antialias=config.antialias)
                grid = np.moveaxis(np.tensordot(weights, grid, axes=(1, axis)), 0, axis)
        x = x + np.concatenate([table[: len(front)], grid.reshape(rows * columns, -1)])
    elif config.position == "sinusoidal":  # https://arxiv.org/abs/2111.06377
        n = config.d_model // 4
        frequencies = 10000.0 ** (-np.arange(n) / n)
        for patch in range(rows * columns):
            angles = [coordinate * frequencies for coordinate in (patch % columns, patch // columns)]
            x[len(front) + patch] += np.concatenate([wave(angle) for angle in angles for wave in (np.sin, np.cos)])
    if config.registers:
        x = np.concatenate([x[: len(front)], part.weight("registers.weight"), x[len(front) :]])
    return unmasked(x)


def resizing(before: int, after: int, *, antialias: bool) -> Any:
    """Return the weights [after, before] of cubic interpolation; to fewer points it may average."""
    a, stretch = (-0.5, max(1.0, before / after)) if antialias else (-0.75, 1.0)
    weights = np.zeros((after, before))
    for i in range(after):
        center = (i + 0.5) * before / after - 0.5
        for k in range(math.ceil(center - 2 * stretch), math.floor(center + 2 * stretch) + 1):
            t = abs(k - center) / stretch
            near, far = (a + 2) * t**3 - (a + 3) * t**2 + 1, a * (t**3 - 5 * t**2 + 8 * t - 4)
            if not antialias or 0 <= k < before:
                weights[i, min(max(k, 0), before - 1)] += near if t <= 1 else far
    return weights / weights.sum(axis=1, keepdims=True)


def conv_stem(part: Part, *, input: Value) -> Value:
    """Apply convolutions over frames [f, width], each with an activation. https://arxiv.org/abs/2212.04356."""
    config, x = part.config, input.x[0].T if input.x.ndim == 3 else input.x  # a spectrogram, or its frames
    for number, stride in enumerate(config.strides):
        padded = np.pad(x, ((config.size // 2,) * 2, (0, 0)))
        windows = [padded[start : start + config.size] for start in range(0, len(x), stride)]
        weight = part.weight(f"convs.{number}.weight")
        x = np.einsum("tkc,ock->to", np.stack(windows), weight) + part.weight(f"convs.{number}.bias")
        x = part.at("activation", config.activation)(x)
    if config.position is not None:
        x = x + part.at("position", config.position)(np.arange(len(x)), x.shape[1])
    return unmasked(x)


def waveform_stem(part: Part, *, input: Value) -> Value:
    """Apply convolutions without padding over samples [t, 1], each with an activation. https://arxiv.org/abs/2006.11477."""
    config, x, real = part.config, input.x, input.tokens
    for number, (size, stride) in enumerate(zip(config.sizes, config.strides, strict=True)):
        layer, starts = part.at(f"layers.{number}"), range(0, len(x) - size + 1, stride)
        windows = np.stack([x[start : start + size] for start in starts])
        x = np.einsum("tkc,ock->to", windows, layer.weight("conv.weight"))
        x = x + (layer.weight("conv.bias") if config.bias else 0)
        real = np.array([real[start : start + size].all() for start in starts])
        if config.normalize == "each" or (config.normalize == "first" and number == 0):
            over = x if config.normalize == "each" else x[real] if real.any() else x
            axis = int(config.normalize == "each")
            y = (x - over.mean(axis, keepdims=True)) / np.sqrt(over.var(axis, keepdims=True) + 1e-5)
            x = y * layer.weight("norm.weight") + layer.weight("norm.bias")
        x = layer.at("activation", config.activation)(x)
    return Value(part.at("output_norm", config.output_norm)(x), np.tile(real, (len(real), 1)))


def group_norm(part: Part, *, input: Value) -> Value:
    """Normalize groups of channels over all positions that are not padding. https://arxiv.org/abs/1803.08494."""
    config, x, real = part.config, input.x, input.tokens
    groups = np.split(x, config.groups, axis=1)
    sources = [group[real] if real.any() else group for group in groups]
    y = [(g - over.mean()) / np.sqrt(over.var() + config.eps) for g, over in zip(groups, sources, strict=True)]
    return Value(np.concatenate(y, axis=1) * part.weight("norm.weight") + part.weight("norm.bias"), input.pairs)


def conv_position(part: Part, *, input: Value) -> Value:
    """Add a convolution whose weight has a norm for each tap, and the activation of it. https://arxiv.org/abs/2006.11477."""
    config, x = part.config, input.x * input.tokens[:, None]
    v, gain = part.weight("conv.direction"), part.weight("conv.gain")
    weight = v * gain / np.sqrt((v**2).sum(axis=(0, 1)))
    before, width = config.size // 2, config.d_model // config.groups
    padded = np.pad(x, ((before, before), (0, 0)))
    windows = [np.split(padded[t : t + config.size], config.groups, axis=1) for t in range(len(x))]
    kernels = weight.reshape(config.groups, width, width, config.size)
    y = np.einsum("tgkc,gock->tgo", np.array(windows), kernels).reshape(x.shape) + part.weight("conv.bias")
    return Value(part.at("norm", config.norm)(x + part.at("activation", config.activation)(y)), input.pairs)


def deep_conv_position(part: Part, *, input: Value) -> Value:
    """Add the output of convolutions, each with a norm of every position and an activation. arXiv:2202.03555."""
    config, y = part.config, input.x
    before, width = config.size // 2, config.d_model // config.groups
    for number in range(config.n_layers):
        padded = np.pad(y * input.tokens[:, None], ((before, before), (0, 0)))
        windows = [np.split(padded[t : t + config.size], config.groups, axis=1) for t in range(len(y))]
        kernels = part.weight(f"convs.{number}.weight").reshape(config.groups, width, width, config.size)
        y = np.einsum("tgkc,gock->tgo", np.array(windows), kernels).reshape(y.shape)
        y = y + part.weight(f"convs.{number}.bias")
        y = (y - y.mean(axis=1, keepdims=True)) / np.sqrt(y.var(axis=1, keepdims=True) + 1e-5)
        y = part.at("activation", config.activation)(y)
    return Value(part.at("norm", config.norm)(input.x + y), input.pairs)


def stack_frames(part: Part, *, input: Value) -> Value:
    """Concatenate neighbouring vectors."""
    return unmasked(np.reshape(input.x, (len(input.x) // part.config.size, -1)))


def token_pool(part: Part, *, input: Value) -> Value:
    """Return the mean of the patches, after the class token if both are selected, or the mean of two class tokens."""
    front = 1 + part.config.registers
    mean = (input.x[:2] if part.config.select == "class_tokens" else input.x[front:]).mean(axis=0)
    both = part.config.select == "class_and_patches"
    return Value(np.concatenate([input.x[0], mean]) if both else mean, np.asarray(True))


def end_pool(part: Part, *, input: Value, tokens: Value) -> Value:
    """Return the vector at the first end of a text, or at its last token."""
    real = np.flatnonzero(input.tokens)
    if not len(real):
        return Value(input.x[0], np.asarray(False))
    ids = tokens.x[real]
    ends = np.flatnonzero(ids == (ids.max() if part.config.end is None else part.config.end))
    return Value(input.x[real[ends[0] if len(ends) else -1]], np.asarray(True))


def attention_pool(part: Part, *, input: Value) -> Value:
    """Compute the attention of a learned query to a sequence, and add an FFN of the result. arXiv:2106.04560."""
    config, query = part.config, part.weight("query.weight")
    y = part.at("attention", config.attention)(query, Scope(input.tokens[None], memory=input.x))
    y = y + part.at("ffn", config.ffn)(part.at("norm", config.norm)(y))
    return Value(y[0], np.asarray(input.tokens.any()))


def contrast(part: Part, *, inputs: Sequence[Sequence[Value]], row: int) -> Value:
    """Compare the image of a row with the texts of all rows: exp(log_scale) * cosine + bias. arXiv:2103.00020."""
    image, texts = inputs[row][0], [text for _, text in inputs]
    lengths = np.linalg.norm(image.x) * np.linalg.norm([text.x for text in texts], axis=1)
    logits = np.exp(part.weight("log_scale")) * np.array([text.x @ image.x for text in texts]) / lengths
    bias = 0 if part.config.bias is None else part.weight("bias")  # as in arXiv:2303.15343
    return Value(logits + bias, image.tokens & np.all([text.tokens for text in texts]))


def late_interaction(part: Part, *, inputs: Sequence[Sequence[Value]], row: int) -> Value:
    """Score the query of a row with the documents of all rows: the sum of the largest cosines. arXiv:2004.12832."""
    query, *documents = (
        value.x[value.tokens] / np.linalg.norm(value.x[value.tokens], axis=1, keepdims=True)
        for value in (inputs[row][0], *(document for _, document in inputs))
    )
    scores = np.array([(query @ document.T).max(axis=1).sum() for document in documents])
    return Value(scores, np.asarray(inputs[row][0].tokens.any()))


def merge_patches(part: Part, *, input: Value) -> Value:
    """Concatenate the vectors of each square of patches, row by row, or return their mean. arXiv:2404.16821."""
    size, rows = part.config.size, part.graph.node(part.path).signals["input"].rows
    columns = len(input.x) // rows
    corners = [(row, column) for row in range(0, rows, size) for column in range(0, columns, size)]
    squares = [[input.x[(r + i) * columns + c + j] for i in range(size) for j in range(size)] for r, c in corners]
    if part.config.by == "unfold":
        squares = [list(np.transpose(square)) for square in squares]
    return unmasked(np.mean(squares, axis=1) if part.config.by == "mean" else np.reshape(squares, (len(corners), -1)))


def join_images(part: Part, *, input: Sequence[Value], images: Sequence[Value]) -> Value:
    """Concatenate the vectors of the images of a row, without the first vectors of each."""
    return unmasked(np.concatenate([image.x[part.config.skip :] for image in input]))


def image_blocks(part: Part, *, input: Value) -> Value:
    """Return 1 at placeholder tokens, 0 elsewhere."""
    return Value((input.x == part.config.token).astype(int), input.pairs)


def image_positions(part: Part, *, input: Value, images: Value) -> Value:
    """Count tokens on three axes; the vectors of an image have its rows and columns. arXiv:2409.12191, section 2.1."""
    signal = part.graph.node(part.path).signals["images"]
    columns = signal.image_length // signal.rows
    positions, following, seen = np.zeros((len(input.x), 3), int), 0, 0
    for token in np.flatnonzero(input.tokens):
        if input.x[token] != part.config.token:
            positions[token] = following + seen  # of an incomplete image
            following += 1
            continue
        row, column = divmod(seen, columns)
        positions[token] = following, following + row, following + column
        seen += 1
        if seen == signal.image_length:
            following, seen = following + max(signal.rows, columns), 0
    return Value(positions, input.pairs)


def place_images(part: Part, *, input: Value, tokens: Value, images: Value) -> Value:
    """Replace the vector of the k-th placeholder token by the k-th vector of the images. arXiv:2304.08485."""
    x = input.x.copy()
    placeholders = np.flatnonzero((tokens.x == part.config.token) & input.tokens)
    x[placeholders] = images.x[: len(placeholders)]
    return Value(x, input.pairs)


def grid_rope(part: Part, x: Any, positions: Any, n_keys: int) -> Any:
    """Rotate pairs of a patch's channels by its row and its column, in [-1, 1] (arXiv:2508.10104) or counted."""
    config, y, d = part.config, x.copy(), x.shape[-1]
    steps = np.arange(d // 4) * 4 / d
    of_rows, of_columns = (config.theta**-exponents for exponents in (steps, steps + 2 / d * config.staggered))
    for token, position in enumerate(positions):
        patch = position - config.class_token - config.registers
        if patch < 0:
            continue
        row, column = divmod(patch, config.columns)
        if config.coordinates == "relative":
            row, column = (
                2 * math.pi * (2 * (coordinate + 0.5) / size - 1)
                for coordinate, size in ((row, config.rows), (column, config.columns))
            )
        angles = np.concatenate([row * of_rows, column * of_columns])
        first, second = np.split(x[token], 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        y[token] = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return y


def grid_bias(part: Part, attention: Any, positions: Any, causal: bool) -> Any:
    """Return a learned bias for each distance in rows and columns, and three for the class token. arXiv:2106.08254."""
    rows, columns = part.config.rows, part.config.columns
    of_class = (2 * rows - 1) * (2 * columns - 1)  # to a patch; then from a patch, and to itself
    index = np.zeros((len(positions), len(positions)), int)
    for q in positions:
        for k in positions:
            if q and k:
                down, right = np.subtract(divmod(q - 1, columns), divmod(k - 1, columns))
                index[q, k] = (down + rows - 1) * (2 * columns - 1) + right + columns - 1
            else:
                index[q, k] = of_class + (q > 0) + 2 * (q == k)
    return part.weight("distances.weight")[index].transpose(2, 0, 1)


def grid_windows(part: Part, queries: Any, keys: Any) -> Any:
    """Return True for two patches in one window of an image. https://arxiv.org/abs/2502.13923."""
    rows, columns = ([np.divmod(patches, part.config.columns)[axis] for patches in (queries, keys)] for axis in (0, 1))
    windows = [[sides // part.config.size for sides in pair] for pair in (rows, columns)]
    return np.logical_and(*(of_queries == of_keys for of_queries, of_keys in windows))


FUNCTIONS = (
    patches,
    conv_stem,
    waveform_stem,
    conv_position,
    deep_conv_position,
    group_norm,
    stack_frames,
    token_pool,
    end_pool,
    attention_pool,
    contrast,
    late_interaction,
    merge_patches,
    image_blocks,
    image_positions,
    join_images,
    place_images,
)
BLOCKS = {function.__name__: function for function in FUNCTIONS}

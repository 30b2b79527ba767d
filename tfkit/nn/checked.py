"""Checks of a model's inputs where they come in: masks that are not masks, and sequences that are too long."""

import torch
from torch import Tensor

from tfkit.nn.layers import is_scripting, is_tracing


def as_padding_mask(mask: Tensor | None, name: str) -> Tensor | None:
    """Return a padding mask as bool [b, t], True where there is a token; see `as_attention_mask` for its errors.

    Raises:
        ValueError: the mask is one of pairs.
    """
    if mask is not None and mask.dim() == 3:
        raise ValueError(f"{name} has pairs of tokens, but here it can only tell tokens [b, t] from padding")
    return as_attention_mask(mask, name)


def is_pairwise(mask: Tensor) -> bool:
    """Return True for a mask of pairs [b, q, k], False for a mask of tokens [b, t], as in all ejected files."""
    return mask.dim() == 3


def as_attention_mask(mask: Tensor | None, name: str) -> Tensor | None:
    """Return a mask as bool: [b, t], True at tokens; or pairwise [b, q, k], True where token q may attend to token k.

    A mask of pairs can hide more than padding, such as documents in one row from each other. None: nothing is hidden.

    Masks of other libraries are added to the scores: 0 where there is a token and minus infinity elsewhere. Read as
    truth values, they say the opposite. Floating-point masks are refused by their type, at no cost. Whole numbers must
    be 0 or 1; their values are checked only where that interrupts nothing: on the CPU, in eager mode.

    Raises:
        ValueError: the mask, which the error calls `name`, is neither bool nor 0 and 1.
    """
    if mask is not None and (mask.is_floating_point() or (can_look(mask) and not zeros_and_ones(mask))):
        raise ValueError(f"{name} is not bool or 0 and 1, with 1 for a token: `mask.bool()`; if additive, `mask == 0`")
    return None if mask is None else mask.to(torch.bool)


def can_look(x: Tensor) -> bool:
    """Return True if values can be read without interrupting a device, a compiler or a tracer."""
    if is_scripting():
        return x.is_cpu
    else:  # noqa: RET505  TorchScript compiles what follows an `if`, but not an `else` that is never reached
        return type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling() and not is_tracing()


def zeros_and_ones(x: Tensor) -> bool:
    """Return True if the mask contains only 0 and 1."""
    return x.dtype == torch.bool or bool(((x == 0) | (x == 1)).all())


def one_run(mask: Tensor) -> Tensor:
    """Return the mask unchanged. Distances are taken between columns, which needs padding at the sides only.

    Raises:
        ValueError: padding stands between the tokens of a row, [b, t]; looked for where that interrupts nothing.
    """
    if can_look(mask) and mask.dim() == 2:
        starts = mask[:, 0] + (mask[:, 1:] & ~mask[:, :-1]).sum(dim=1)
        if bool((starts > 1).any()):
            raise ValueError(
                "padding must not be between tokens, where it would count in their distances: move it to one side"
            )
    return mask


def check_length(x: Tensor, length: int, name: str) -> Tensor:
    """Return sequences [b, t, ...] unchanged; raise ValueError for a different number of positions."""
    if x.size(1) != length:
        raise ValueError(f"{name} must have {length} positions, which this model always reads; got {x.size(1)}")
    return x


def check_optional_length(x: Tensor | None, length: int, name: str) -> Tensor | None:
    """Return an optional input unchanged; see `check_length`."""
    return None if x is None else check_length(x, length, name)


def check_positions(positions: Tensor, x: Tensor, axes: int) -> Tensor:
    """Return the positions of x [b, t, ...] unchanged: integers [b, t] or, if there are `axes`, [b, t, axes].

    Raises:
        ValueError: the tensor has another shape or type.
    """
    shape = [x.size(0), x.size(1)]
    if axes > 0:
        shape.append(axes)
    if positions.is_floating_point() or list(positions.shape) != shape:
        raise ValueError(f"positions must be integers {shape}; got {positions.dtype} {list(positions.shape)}")
    return positions


def check_max_len(tokens: Tensor, max_len: int) -> Tensor:
    """Return the tokens [b, t] unchanged; raise ValueError if they, padding included, are longer than `max_len`."""
    if tokens.size(1) > max_len:
        limit = f"max_len ({max_len}), which can be set when building: --set max_len=N"
        raise ValueError(f"{tokens.size(1)} tokens are more than {limit}")
    return tokens

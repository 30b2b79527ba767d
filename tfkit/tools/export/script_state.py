"""The state of a scripted model's sequences: a dictionary of lists of tensors, which the methods update.

The key of a cache is the name of its node, with a list of tensors for each layer. The key of a value that is read once
is its name after a dot. `.columns` is an int tensor [3]: the columns read, the capacity in columns, and 1 after
padding. `.lengths`, [b], counts the tokens of each row. Tensors are updated in place, but the dictionary never changes:
TorchScript passes copies of it to Python, and a copy is therefore the same state.

TorchScript compiles these functions, which is why their annotations are evaluated.
"""

import torch
from torch import Tensor

from tfkit.nn import Past


def empty_state(batch: int, length: int, like: Tensor) -> dict[str, list[list[Tensor]]]:
    """Return the state of `batch` sequences before the first token, with room for `length` columns."""
    lengths = torch.zeros(batch, dtype=torch.long, device=like.device)
    return {".columns": [[torch.tensor([0, length, 0])]], ".lengths": [[lengths]]}


def add_caches(
    state: dict[str, list[list[Tensor]]], name: str, layers: int, sizes: list[tuple[int, int, int, bool]], like: Tensor
) -> None:
    """Add the caches of equal layers to the caches of `name`: [b, heads, slots, width] for each of `sizes`.

    The last value of a size is True for a tensor that has at least float32.
    """
    batch = state[".lengths"][0][0].size(0)
    if name not in state:
        state[name] = torch.jit.annotate(list[list[Tensor]], [])
    for _ in range(layers):
        caches = torch.jit.annotate(list[Tensor], [])
        for heads, slots, width, wide in sizes:
            dtype = torch.promote_types(like.dtype, torch.float32) if wide else like.dtype
            caches.append(torch.zeros((batch, heads, slots, width), dtype=dtype, device=like.device))
        state[name].append(caches)


def keep_value(state: dict[str, list[list[Tensor]]], name: str, value: Tensor | None) -> None:
    """Store a value that is read once, unless it is None."""
    if value is None:
        return
    batch = state[".lengths"][0][0].size(0)
    if value.size(0) != batch:
        raise ValueError(f"`{name}` must have {batch} rows, as the batch; got {value.size(0)}")
    state[f"{name}."] = [[value]]


def kept_value(state: dict[str, list[list[Tensor]]], name: str) -> Tensor | None:
    """Return a value that `keep_value` stored, or None."""
    key = f"{name}."
    return state[key][0][0] if key in state else None


def first_value(state: dict[str, list[list[Tensor]]], name: str) -> Tensor | None:
    """Return a value in the first step, and None in later steps, which read it from the caches."""
    return kept_value(state, name) if int(state[".columns"][0][0][0]) == 0 else None


def past_of(state: dict[str, list[list[Tensor]]], tokens: Tensor, mask: Tensor | None) -> Past:
    """Return the counts of the tokens that were read before `tokens`."""
    columns, lengths, t = state[".columns"][0][0], state[".lengths"][0][0], tokens.size(1)
    start, length = int(columns[0]), int(columns[1])
    if tokens.size(0) != lengths.size(0):
        raise ValueError(f"tokens must have {lengths.size(0)} rows, one for each sequence; got {tokens.size(0)}")
    if t == 0:
        raise ValueError("a step must have at least one token")
    if start + t > length:
        raise ValueError(f"{t} more tokens do not fit: {start} of {length} columns are used")
    if mask is not None:
        columns[2] = 1
    return Past(start, length, lengths if bool(columns[2] == 1) else None)


def move_on(state: dict[str, list[list[Tensor]]], tokens: Tensor, mask: Tensor | None) -> None:
    """Add `tokens` to the counts of the tokens that were read."""
    state[".columns"][0][0][0] += tokens.size(1)
    state[".lengths"][0][0].add_(torch.tensor(tokens.size(1)) if mask is None else mask.long().sum(dim=1))

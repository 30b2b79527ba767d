"""Tensors of a file that the model computes. They are compared with the computed values instead of being loaded.

A family names the function and its argument: `"*.attn.bias": = causal_mask(decoder)`. A function with the path of a
number of rows is also written to files: `= sinusoids(embedding.position, embedding.max_len)`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, fx

from tfkit.checkpoint.config_json import value_at
from tfkit.checkpoint.tensor_names import name_and_numbers
from tfkit.component import ABSENT, AttentionConfig, BlockConfig
from tfkit.errors import Invalid, listing, quoted

Expected = Callable[[str, Tensor], Tensor]
"""Computes the expected values of a tensor from its name and the stored tensor."""
ANGLE_TOLERANCE = 1e-3
"""Tolerance for sines and cosines of large angles that the publisher computed in a different precision."""
MASK_THRESHOLD = -1e4
"""Maximum score that represents a masked position in published files."""
_CALL = re.compile(r"(\w+)\(([\w.]*)(?:, ([\w.]+))?\)")


def tensor_function(model: fx.GraphModule, text: str) -> Expected:
    """Return the function that a family names in a text such as `causal_mask(decoder)`.

    Raise `Invalid` if no such function exists.
    """
    call = _CALL.fullmatch(text)
    if call is None or call[1] not in FUNCTIONS:
        calls = listing((f"{name}(...)" for name in FUNCTIONS), 10)
        raise Invalid("", f"{quoted(text)} is not a function of the model", notes=[f"it can be {calls}"])
    return partial(FUNCTIONS[call[1]], model, call[2])


def writing_function(model: fx.GraphModule, name: str, text: str) -> Callable[[], Tensor] | None:
    """Return the function that computes a tensor for writing; None if the text has no rows or the model lacks the path.

    The second argument of the function is the path of the number of rows: `sinusoids(embedding.position, max_len)`.
    """
    call = _CALL.fullmatch(text)
    if call is None or call[3] is None or value_at(model.meta["graph"].spec.model, call[2]) in (None, ABSENT):
        return None
    rows = int(_spec_number(model, call[3])) + int(_spec_number(model, f"{call[2]}.offset", 0))
    return lambda: tensor_function(model, text)(name, torch.zeros(rows, 1, device="cpu"))


def is_close(stored: Tensor, expected: Tensor) -> bool:
    """Return True if a tensor of a file equals the computed tensor within the precision of its dtype."""
    if stored.shape != expected.shape:
        return False
    near = max(ANGLE_TOLERANCE, 4 * torch.finfo(stored.dtype).eps) if stored.is_floating_point() else 0.0
    return torch.allclose(stored.double(), expected.double(), rtol=near, atol=near)


def _integer_range(model: fx.GraphModule, path: str, name: str, stored: Tensor) -> Tensor:
    """Return the integers from 0."""
    return torch.arange(stored.size(-1), device=stored.device).expand(stored.shape)


def _causal_mask(model: fx.GraphModule, path: str, name: str, stored: Tensor) -> Tensor:
    """Return the mask of a layer of the stack at `path`, with its window: True where a position attends to another."""
    block = value_at(model.meta["graph"].spec.model, path)
    stack = block.stack() if isinstance(block, BlockConfig) else None
    number = next(iter(name_and_numbers(name)[1]), 0)
    steps = stack.layers[number].steps if stack is not None and number < len(stack.layers) else ()
    left = next((step.mask.left for step in steps if step.mask is not None), None)
    n = stored.size(-1)
    mask = torch.ones(n, n, dtype=torch.bool, device=stored.device).tril()
    return (mask if left is None else mask.triu(-left)).expand(stored.shape)


def _masked_score(model: fx.GraphModule, path: str, name: str, stored: Tensor) -> Tensor:
    """Clamp the stored scores to `MASK_THRESHOLD`, because a softmax maps all scores below it to 0."""
    return stored.clamp(max=MASK_THRESHOLD)


def _sinusoid_table(model: fx.GraphModule, path: str, name: str, stored: Tensor) -> Tensor:
    """Return the table of the positions at `path`.

    Rows before the first position are never used, so they may have any values.
    """
    if path not in model.meta["components"]:
        return torch.empty(0)
    offset = int(_spec_number(model, f"{path}.offset", 0))
    table: Tensor = model.get_submodule(path)(torch.arange(stored.size(0), device=stored.device)[None] - offset)[0]
    before = stored[:offset].to(table)
    return torch.cat((before.expand(-1, table.size(1)) if before.size(1) == 1 else before, table[offset:]))


def _rotary_table(model: fx.GraphModule, path: str, name: str, stored: Tensor) -> Tensor:
    """Return the sines, then the cosines, of the rotary angles at `path`; each row is a position."""
    angles = torch.arange(stored.size(0), device=stored.device)[:, None] * _unscaled_frequencies(model, path)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def _rotary_frequencies(model: fx.GraphModule, path: str, name: str, stored: Tensor) -> Tensor:
    """Return the frequencies of the rotary positions at `path`, before any scaling."""
    return _unscaled_frequencies(model, path)


def _unscaled_frequencies(model: fx.GraphModule, path: str) -> Tensor:
    attention = value_at(model.meta["graph"].spec.model, path.rpartition(".")[0])
    head = attention.head_width if isinstance(attention, AttentionConfig) else 0
    width = _spec_number(model, f"{path}.width", head)
    return _spec_number(model, f"{path}.theta") ** -(
        torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    )


def _of_mixer(model: fx.GraphModule, path: str, name: str, stored: Tensor) -> Tensor:
    """Return the tensor that a mixer of the stack at `path` computes: `config.table(name, stored, depth)`.

    The depth is 0 in the first layer and 1 in the last layer, and linear in between.
    """
    number = next(iter(name_and_numbers(name)[1]), 0)
    config = model.meta["components"].get(f"{path}.layers.{number}.mixer")
    if not hasattr(config, "table"):
        return torch.empty(0)
    depth = number / max(_spec_number(model, f"{path}.n_layers") - 1, 1)
    table: Tensor = config.table(name.rpartition(".")[2], stored, depth)
    return table


def _spec_number(model: fx.GraphModule, path: str, default: float = math.nan) -> float:
    """Return a number of the spec, or `default` if the model lacks it. The default NaN differs from every number."""
    value = value_at(model.meta["graph"].spec.model, path)
    return value if isinstance(value, int | float) else default


FUNCTIONS: Mapping[str, Callable[[fx.GraphModule, str, str, Tensor], Tensor]] = {
    "counts": _integer_range,
    "causal_mask": _causal_mask,
    "masked_score": _masked_score,
    "sinusoids": _sinusoid_table,
    "rotary_table": _rotary_table,
    "rotary_frequencies": _rotary_frequencies,
    "of_mixer": _of_mixer,
}
"""Functions that a family may name."""

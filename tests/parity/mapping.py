"""Another implementation's parameters under our names: renamed, fused, transposed, and nothing left over.

A map has one entry per module or parameter of ours, `{i}` standing for the number of a layer, and says where it comes
from: a name, several whose rows are stacked, or a name and what to do with its tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from einops import rearrange
from torch import Tensor


@dataclass(frozen=True)
class Changed:
    """The parameters of module `name`, or the parameter `name`, through a function."""

    name: str
    change: Callable[[Tensor], Tensor]


Source: TypeAlias = str | tuple[str, ...] | Changed
WeightMap: TypeAlias = Mapping[str, Source]


def transposed(name: str) -> Changed:
    """A matrix stored [in, out]; vectors stay."""
    return Changed(name, lambda tensor: tensor.mT if tensor.dim() == 2 else tensor)


def part(name: str, index: int, count: int) -> Changed:
    """One of `count` equal parts of the rows."""
    return Changed(name, lambda tensor: tensor.chunk(count)[index])


def by_head(name: str, n_heads: int) -> Changed:
    """Rows stored as query, key, value of one head after the other: all queries first, then keys, then values."""
    return Changed(name, lambda tensor: rearrange(tensor, "(h p d) ... -> (p h d) ...", h=n_heads, p=3))


def renamed(names: Iterable[str], theirs: Mapping[str, Tensor], weights: WeightMap) -> dict[str, Tensor]:
    """Their tensors under our `names`; every name of ours is filled, and every tensor of theirs is used."""
    used: set[str] = set()
    found = {name: _value(name, theirs, weights, used) for name in names}
    left = sorted(set(theirs) - used)
    assert not left, f"no place in our model for {left}"
    return found


def _value(name: str, theirs: Mapping[str, Tensor], weights: WeightMap, used: set[str]) -> Tensor:
    number = re.search(r"\.(\d+)\.", name)
    pattern = re.sub(r"\.\d+\.", ".{i}.", name, count=1)
    module, _, leaf = pattern.rpartition(".")
    source, ending = (weights[pattern], "") if pattern in weights else (weights[module], f".{leaf}")
    stems = (source.name,) if isinstance(source, Changed) else (source,) if isinstance(source, str) else source
    keys = [stem.replace("{i}", number[1] if number else "") + ending for stem in stems]
    used.update(keys)
    tensor = torch.cat([theirs[key] for key in keys])
    return source.change(tensor) if isinstance(source, Changed) else tensor

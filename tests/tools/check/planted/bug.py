"""A bug that replaces a method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

Patch = tuple[Any, str, Any]


@dataclass(frozen=True)
class Bug:
    """A planted bug.

    Attributes:
        bug: what is wrong, in a few words.
        where: the public thread about one like it.
        model: the model that has it, one of `models.MODELS`.
        red: the property that must break.
        patches: the objects, their attributes, and what stands there instead.
    """

    bug: str
    where: str
    model: str
    red: str
    patches: tuple[Patch, ...]


BUGS: list[Bug] = []


def plant(bug: str, where: str, model: str, red: str, owner: Any, name: str) -> Callable[[Any], Any]:
    """A bug whose patch is the function below."""

    def add(function: Any) -> Any:
        BUGS.append(Bug(bug, where, model, red, ((owner, name, function),)))
        return function

    return add


def fused(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **changed: Any) -> Tensor:
    """The fused core, with some of its arguments changed."""
    causal = self.causal and mask is None and q.size(2) == k.size(2)
    options = {"is_causal": causal, "scale": self.scale, "enable_gqa": self.grouped, **changed}
    return F.scaled_dot_product_attention(q, k, v, changed.pop("attn_mask", mask), **options)

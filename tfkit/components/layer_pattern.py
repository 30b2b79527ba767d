"""Layers that differ or share weights: named variants of a stack's layer, and the pattern that places them.

Groups: https://arxiv.org/abs/1909.11942. Pattern: https://arxiv.org/abs/2408.00118.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from tfkit.component import Config, Count, Extent, PatchMarker
from tfkit.components.layer import LayerConfig
from tfkit.errors import Invalid, listing, quoted, similar_name_help

BASE = "base"


class LayersConfig(Config):
    """Layers that differ, or that share weights."""

    variants: Annotated[dict[str, LayerConfig], PatchMarker()] = Field(default_factory=dict)
    """Named changes to the stack's layer; `base` is the layer unchanged."""
    pattern: tuple[str, ...] | dict[str, str] | None = None
    """Variant of each layer: a list that repeats (`[local*5, global]`), or a mapping of layers and ranges
    (`{0-2: dense, rest: experts}`), in which `"-1"` is the last."""
    groups: Count | None = None
    """Number of layers with separate weights; each of them runs n_layers / groups times."""
    order: Literal["in_a_row", "looped"] | tuple[Extent, ...] = "in_a_row"
    """Order of the runs: each layer runs its times in a row, 0 0 1 1; or all layers run, and then all run again,
    0 1 0 1 (https://arxiv.org/abs/1807.03819); or, without `groups`, a list of n_layers layers: `[0, 1, 0, 2]`."""

    def check(self) -> None:
        """Raise `Invalid` for unknown variants in a pattern, and for variants that no pattern uses."""
        super().check()
        listed = isinstance(self.order, tuple)
        if self.pattern is None and self.groups is None and not self.variants and not listed:
            raise Invalid("", "`layers` has no effect: it is empty", help="write `pattern:` or `groups:`, or remove it")
        self._check_order()
        if BASE in self.variants:
            raise Invalid(f"variants.{BASE}", "a variant cannot be named `base`, the name of the layer without changes")
        for name in self.variants:
            plain = name.isascii() and name.isidentifier()  # Python would normalize some other letters to these
            if not plain or hasattr(nn.ModuleDict, name) or name == "training":
                help = "use ASCII letters, digits and `_`, and avoid the attribute names of `nn.ModuleDict`"
                raise Invalid(f"variants.{name}", f"{quoted(name)} cannot be the name of a variant", help=help)
        used = self._used()
        for location, name in used.items():
            if name not in self.variants and name != BASE:
                names = [*self.variants, BASE]
                near, notes = similar_name_help("a variant", name, names), [f"variants: {listing(names)}"]
                raise Invalid(f"pattern.{location}", f"unknown variant `{name}`", notes=notes, help=near)
        for name in self.variants:
            if name not in used.values():
                why = "there is no `pattern`" if self.pattern is None else "the pattern does not use it"
                raise Invalid(f"variants.{name}", f"variant `{name}` has no effect: {why}")

    def _check_order(self) -> None:
        """Raise `Invalid` for an order without effect, and for a list that omits a layer."""
        if not isinstance(self.order, tuple):
            if self.groups is None and self.order != "in_a_row":
                help = "set `groups`, the number of layers with separate weights"
                raise Invalid("order", "`order` has no effect: no layer runs several times", help=help)
            return
        if self.groups is not None:
            raise Invalid("groups", "`groups` has no effect: `order` lists the layers", help="remove it")
        last = max(self.order, default=0)
        if missing := sorted({*range(last)} - {*self.order}):
            message = f"`order` must contain every layer from 0 to {last}; layer {missing[0]} is missing"
            raise Invalid("order", message)
        if len({*self.order}) == len(self.order):
            raise Invalid("order", "`order` has no effect: no layer runs several times", help="remove it")

    def runs(self, n_layers: int) -> tuple[int, ...] | None:
        """Return the layer at each depth of a stack; None if each layer runs once."""
        if isinstance(self.order, tuple):
            return self.order
        if self.groups is None:
            return None
        times, numbers = n_layers // self.groups, range(self.groups)
        if self.order == "looped":
            return (*numbers,) * times
        return tuple(number for number in numbers for _ in range(times))

    def _used(self) -> dict[str, str]:
        """Return the variants in the pattern, by the key or index of the entry."""
        if isinstance(self.pattern, dict):
            return self.pattern
        return {str(i): _repeated(i, word)[0] for i, word in enumerate(self.pattern or ())}

    def arrange(self, n: int) -> list[str]:
        """Return the variant of each of `n` layers; raise `Invalid` if the pattern does not fit them."""
        if self.pattern is None:
            return [BASE] * n
        if isinstance(self.pattern, dict):
            return _placed(self.pattern, n)
        runs = [_repeated(i, word) for i, word in enumerate(self.pattern)]
        length = sum(times for _, times in runs)
        if length > n:
            raise Invalid(
                "layers.pattern", f"the pattern must have at most {n} layers, as many as the stack; got {length}"
            )
        if not runs:
            raise Invalid("layers.pattern", "the pattern is empty", help="write `[local*5, base]`, or remove it")
        cycle = [name for name, times in runs for _ in range(times)]
        return [cycle[i % length] for i in range(n)]

    def period(self) -> tuple[int | None, int]:
        """Return the period of the pattern in layers, None if it fixes their number, and the minimum number."""
        if isinstance(self.order, tuple):
            return None, len(self.order)
        if self.groups is not None:
            return self.groups, self.groups
        if isinstance(self.pattern, dict):
            ends = [int(end) for key in self.pattern if key != "rest" for end in key.lstrip("-").split("-")]
            return (1 if "rest" in self.pattern else None), max(ends, default=0) + 2
        length = sum(times for _, times in (_repeated(i, word) for i, word in enumerate(self.pattern or ())))
        return (length, length) if length else (1, 1)


def _repeated(index: int, word: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\w+)(?:\*([1-9]\d{0,3}))?", word)
    if match is None:
        raise Invalid(
            f"pattern.{index}",
            f"an item of the pattern must be a variant, or a variant with a count; got {quoted(word)}",
            help="write `local`, or `local*5` for five layers in a row",
        )
    return match[1], int(match[2] or 1)


def _placed(pattern: dict[str, str], n: int) -> list[str]:
    names: list[str | None] = [None] * n
    for key, name in pattern.items():
        if key == "rest":
            continue
        location = f"layers.pattern.{key}"
        from_end = re.fullmatch(r"-[1-9]\d{0,3}", key) is not None and n + int(key) >= 0
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", str(n + int(key)) if from_end else key)
        if match is None:
            raise Invalid(location, f"{quoted(key)} is not a layer", help='write `"3"`, `0-2` or `rest`')
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise Invalid(location, f"the first layer of `{key}` must not come after its last")
        if last >= n:
            raise Invalid(
                location, f"there is no layer {last}: the stack has {n}", help=f"use a layer from 0 to {n - 1}"
            )
        for i in range(first, last + 1):
            if names[i] is not None:
                raise Invalid(location, f"layer {i} is in the pattern twice")
            names[i] = name
    if None in names and "rest" not in pattern:
        help = "add `rest: base`, or another variant, for all remaining layers"
        raise Invalid("layers.pattern", f"layer {names.index(None)} has no variant", help=help)
    if None not in names and "rest" in pattern:
        raise Invalid("layers.pattern.rest", "`rest` has no effect: no layers remain", help="remove it")
    return [pattern["rest"] if name is None else name for name in names]

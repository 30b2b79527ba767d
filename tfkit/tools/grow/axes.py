"""The growth of an axis of a weight, as factors of its index, and its text in a `weights.map`.

An axis is a join of segments, and a segment is a product of factors, the last of which varies fastest. Every factor has
an old and a new size: 4 heads of width 8 that become 8 heads, each next to its copy, are the factors 4, 1 -> 2, 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

Segment: TypeAlias = "tuple[AxisFactor, ...]"
Axis: TypeAlias = "tuple[Segment, ...]"


class NestedGrowth(Exception):  # noqa: N818  it is caught, and never shown
    """Two growths of an axis that a single pattern cannot express."""


@dataclass(frozen=True)
class AxisFactor:
    """A factor of the index of an axis.

    With a `fill`, new values are zeros or initial values. Otherwise the factor is unchanged, has an old size of 1 and
    repeats, or has a new size of 1 and averages.
    """

    old: int
    new: int
    fill: str = ""

    @property
    def is_plain(self) -> bool:
        """True if the factor does not grow."""
        return self.old == self.new

    @property
    def is_named(self) -> bool:
        """True if the factor has a name on the left side of a pattern."""
        return self.old > 1 or self.is_plain


def plain_axis(size: int) -> Axis:
    """Return the growth of an axis that does not grow."""
    return ((AxisFactor(size, size),),)


def is_plain(axis: Axis) -> bool:
    """Return True if an axis does not grow."""
    return all(factor.is_plain for segment in axis for factor in segment)


def is_repeated(axis: Axis) -> bool:
    """Return True if values of an axis are repeated."""
    return any(factor.old == 1 < factor.new and not factor.fill for segment in axis for factor in segment)


def new_size(axis: Axis) -> int:
    """Return the size of an axis after its growth."""
    return sum(math.prod(factor.new for factor in segment) for segment in axis)


def composed(first: Axis, second: Axis) -> Axis:
    """Return the growth by `first`, then by `second`. Raise NestedGrowth if a pattern cannot express it."""
    if is_plain(second):
        return first
    if is_plain(first):
        return second
    if len(first) != len(second):
        raise NestedGrowth
    return tuple(_composed_segment(a, b) for a, b in zip(first, second, strict=True))


def _composed_segment(first: Segment, second: Segment) -> Segment:
    pending, result = list(first), []
    for factor in second:
        if factor.old == 1:
            result.append(factor)
            continue
        taken = list(_taken_factors(pending, factor.old))
        if factor.is_plain:
            result += taken
        elif all(part.is_plain for part in taken):
            result.append(factor)
        else:
            raise NestedGrowth
    return _merged((*result, *pending))


def _taken_factors(pending: list[AxisFactor], size: int) -> Iterator[AxisFactor]:
    """Remove factors whose new sizes have the product `size` from the start of a list, and yield them."""
    while size > 1:
        if not pending:
            raise NestedGrowth
        head = pending.pop(0)
        if size % head.new == 0:
            size //= head.new
            yield head
        elif head.is_plain and head.new % size == 0:
            yield AxisFactor(size, size)
            pending.insert(0, AxisFactor(head.new // size, head.new // size))
            return
        else:
            raise NestedGrowth


def _merged(segment: Segment) -> Segment:
    """Join adjacent factors that do not grow, and remove factors of size 1."""
    factors = [factor for factor in segment if (factor.old, factor.new) != (1, 1)]
    result: list[AxisFactor] = []
    for factor in factors:
        if result and factor.is_plain and result[-1].is_plain:
            size = result.pop().old * factor.old
            result.append(AxisFactor(size, size))
        else:
            result.append(factor)
    return tuple(result) or (AxisFactor(1, 1),)


def with_fill(axis: Axis, fill: str) -> Axis:
    """Replace the fill of every factor that has one."""
    return tuple(tuple(replace(part, fill=fill) if part.fill else part for part in segment) for segment in axis)


def axis_of(*factors: AxisFactor) -> Axis:
    """Return an axis with a single segment."""
    return (_merged(factors),)


# ---- the text of a pattern ----

LETTERS = {1: ["i"], 2: ["o", "i"], 3: ["e", "o", "i"]}
"""Names of axes by the rank of a weight: e layers of a stack, o outputs, i inputs."""


def pattern_text(axes: Sequence[Axis], *, inserted: int = 0, divisor: float = 1.0) -> str | None:
    """Return the pattern of the growth of all axes of a weight; None if nothing changes.

    The first `inserted` axes exist only in the new weight.
    """
    if all(map(is_plain, axes)) and divisor == 1 and not inserted:
        return None
    factors = [factor for axis in axes[inserted:] for segment in axis for factor in segment]
    if any(factor.new == 1 < factor.old for factor in factors) and any(map(is_repeated, axes)):
        raise NestedGrowth  # a pattern averages or repeats
    letters = LETTERS.get(len(axes)) or [f"x{number}" for number in range(len(axes))]
    copies = iter(["c", *(f"c{number}" for number in range(2, 100))])
    sides = [_axis_texts(axis, letter, copies) for axis, letter in zip(axes, letters, strict=True)]
    left = " ".join(text for text, _ in sides[inserted:])
    return f"{left} -> {' '.join(text for _, text in sides)}{_division(divisor)}"


def _division(divisor: float) -> str:
    if divisor == 1:
        return ""
    return f" / {divisor:.0f}" if divisor == int(divisor) else f" / {divisor:.17g}"


def _axis_texts(axis: Axis, letter: str, copies: Iterator[str]) -> tuple[str, str]:
    """Return the texts of an axis on the left and on the right side of a pattern."""
    factors = [factor for segment in axis for factor in segment]
    if sum(bool(factor.fill) for factor in factors) > 1:
        raise NestedGrowth
    count = sum(factor.is_named for factor in factors)
    numbers = iter(range(1, count + 1))
    left, right = [], []
    for segment in axis:
        left.append(list[str]())
        right.append(list[str]())
        for factor in segment:
            name = None
            if factor.is_named:
                number = next(numbers)
                name = letter if count == 1 else f"{letter}{number}"
                # The size of one name follows from the size of the axis.
                left[-1].append(name if number == count else f"{name}={factor.old}")
            text = _right_text(factor, name, copies)
            right[-1] += [text] if text else []
    return _joined(left), _joined(right)


def _right_text(factor: AxisFactor, name: str | None, copies: Iterator[str]) -> str | None:
    if factor.fill:
        return f"[{name or 1} {factor.fill}]"
    if factor.is_plain:
        return name
    return None if factor.new == 1 else f"{next(copies)}={factor.new}"


def _joined(segments: Sequence[Sequence[str]]) -> str:
    products = [texts[0] if len(texts) == 1 else f"({' '.join(texts)})" if texts else "1" for texts in segments]
    return products[0] if len(products) == 1 else f"[{' '.join(products)}]"

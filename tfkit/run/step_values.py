"""Numbers of a run that change by step, such as the batch size: in jumps, `at`, or linearly, `from`, `to` and `over`.

Each form becomes a list of constant intervals, so sums over all former steps are exact. Steps count completed updates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

from tfkit.errors import Invalid, quoted
from tfkit.run.contract import count_of

Changes: TypeAlias = Annotated[Mapping[str, Any], "a mapping `at: {0: 8, 1000: 32}`, or `from`, `to` and `over`"]
LINEAR = ("from", "to", "over")
FORMS = "write `{at: {0: 8, 1000: 32}}` or `{from: 8, to: 32, over: 0.2}`"
MAX_VALUE = 2**20
"""Maximum of a count that changes, and of the intervals of a linear change: for each integer, or step of a real number.
"""
N = TypeVar("N", int, float, Fraction)
R = TypeVar("R", int, float, Fraction)


@dataclass(frozen=True)
class StepValues(Generic[N]):
    """A number for each step: `values[i]` from `starts[i]` completed updates on. The first start is 0."""

    starts: tuple[int, ...]
    values: tuple[N, ...]

    def value(self, step: int) -> N:
        """Return the value in a step; the first step is 1."""
        return self.values[bisect_right(self.starts, step - 1) - 1]

    def before(self, step: int) -> N:
        """Return the sum of the values in all steps before a step."""
        number = bisect_right(self.starts, step - 1) - 1
        return self._sums[number] + (step - 1 - self.starts[number]) * self.values[number]

    def steps_for(self, total: Fraction) -> int:
        """Return the smallest number of steps whose values add up to at least `total`."""
        number = max(bisect_right(self._sums, total) - 1, 0)
        return self.starts[number] + math.ceil((total - self._sums[number]) / self.values[number])

    def combined(self, other: StepValues[N], function: Callable[[N, N], R]) -> StepValues[R]:
        """Return a function of the values of two numbers in each step."""
        starts = tuple(sorted({*self.starts, *other.starts}))
        return StepValues(starts, tuple(function(self.value(n + 1), other.value(n + 1)) for n in starts))

    @cached_property
    def _sums(self) -> tuple[N, ...]:
        """The sum of the values before each start."""
        lengths, zero = (end - start for start, end in pairwise(self.starts)), self.values[0] * 0
        return tuple(accumulate((n * value for n, value in zip(lengths, self.values, strict=False)), initial=zero))


def has_fraction(value: object) -> bool:
    """Return True if a value changes at a fraction of the run's steps."""
    points = (value.get("over"), *map(_point, value.get("at", ()))) if isinstance(value, Mapping) else ()
    return any(isinstance(point, float) for point in points)


def listed_values(value: float | Mapping[str, Any]) -> list[Any]:
    """Return the values that a change lists, in order: all values of `at`, or `from` and `to`."""
    if not isinstance(value, Mapping):
        return [value]
    return [*value.get("at", {}).values()] or [value["from"], value["to"]]


def step_values(value: float | Mapping[str, Any], steps: int = 0, *, real: bool = False) -> StepValues[Any]:
    """Return the value of each step in a run of `steps` steps, which only fractions depend on.

    A linear change takes all integers between its ends, or with `real`, a different value in each step. Raise `Invalid`
    if two changes are at the same step.
    """
    if not isinstance(value, Mapping):
        return StepValues((0,), (value,))
    if "at" in value:
        starts = [count_of(_point(key) or 0, steps) for key in value["at"]]
        for key, (start, end) in zip([*value["at"]][1:], pairwise(starts), strict=True):
            if end <= start:
                raise Invalid(f"at.{key}", f"steps must increase; got {end:,} after {start:,}")
        return StepValues(tuple(starts), tuple(float(n) if real else n for n in value["at"].values()))
    first, last, over = value["from"], value["to"], count_of(value["over"], steps)
    if real:
        if over > MAX_VALUE:
            raise Invalid("over", f"`over` must be at most {MAX_VALUE:,} steps; got {over:,}")
        ramp = [first + (last - first) * (step / over) for step in range(over)]
        return StepValues(tuple(range(over + 1)), tuple(map(float, (*ramp, last))))
    distance, sign = abs(last - first), 1 if last > first else -1
    changes = {0: first}
    for number in range(1, distance + 1):  # the first step at which `number` is the nearest integer
        changes[-(-(2 * number - 1) * over // (2 * distance))] = first + sign * number
    return StepValues(tuple(changes), tuple(changes.values()))


def check_changes(value: Mapping[str, Any], check_value: Callable[[str, Any], None]) -> None:
    """Raise `Invalid` unless a mapping is a valid change. `check_value` gets the path of each value, and the value."""
    if set(value) == {"at"} and isinstance(value["at"], Mapping) and value["at"]:
        points = [_point(key) for key in value["at"]]
        for key, point in zip(value["at"], points, strict=True):
            if point is None:
                message = f"a step must be an integer, or a fraction between 0 and 1; got {quoted(str(key))}"
                raise Invalid(f"at.{key}", message)
            check_value(f"at.{key}", value["at"][key])
        if points[0] != 0:
            message = f"the first step must be 0; got {next(iter(value['at']))}"
            raise Invalid("at", message, help="add the value at the start: `0: ...`")
        if not has_fraction(value):
            step_values(value)
    elif set(value) == set(LINEAR):
        for name in LINEAR[:2]:
            check_value(name, value[name])
        over = value["over"]
        if type(over) not in (int, float) or over <= 0 or (isinstance(over, float) and over > 1):
            message = f"`over` must be a number of steps, or a fraction of at most 1; got {over}"
            raise Invalid("over", message)
        if value["from"] == value["to"]:
            raise Invalid("to", f"`to` has no effect: it equals `from`, {value['to']}", help=f"write {value['to']}")
    else:
        raise Invalid("", "a number that changes must have `at`, or `from`, `to` and `over`", help=FORMS)


def check_count(path: str, value: Any) -> None:
    """Raise `Invalid` unless a value is a positive integer."""
    if type(value) is not int or not 1 <= value <= MAX_VALUE:
        raise Invalid(path, f"the value must be an integer from 1 to {MAX_VALUE:,}; got {value}")


def check_number(path: str, value: Any) -> None:
    """Raise `Invalid` unless a value is a number."""
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > MAX_VALUE:
        raise Invalid(path, f"the value must be a number of at most {MAX_VALUE:,}; got {value}")


def _point(key: str) -> int | float | None:
    """Return a step, or a fraction of the steps; None for any other key."""
    try:
        return int(key) if key.isascii() and key.isdigit() else _fraction(float(key))
    except ValueError:
        return None


def _fraction(number: float) -> float | None:
    return number if 0 < number < 1 else None

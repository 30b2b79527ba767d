"""The facts about values that are known before the model runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeGuard

from torch import nn


@dataclass(frozen=True)
class AbstractValue:
    """Any value: nothing is known, and it may be None."""


@dataclass(frozen=True)
class Some(AbstractValue):
    """A value that is not None, such as a tensor, or a number that depends on a tensor."""


@dataclass(frozen=True, eq=False)
class ConcreteValue(AbstractValue):
    """A known value. Literals are written where they are used; other values keep their names."""

    value: Any
    literal: bool = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ConcreteValue) or self.literal != other.literal:
            return False
        same = type(self.value) is type(other.value)
        return self.value is other.value or (same and _is_data(self.value) and bool(self.value == other.value))

    def __hash__(self) -> int:
        return hash(type(self.value))


@dataclass(frozen=True)
class Modules(AbstractValue):
    """One of these modules, as `layer` in a loop over layers."""

    modules: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Method(AbstractValue):
    """A method of one of these modules."""

    modules: tuple[nn.Module, ...]
    name: str


@dataclass(frozen=True)
class RecordValue(AbstractValue):
    """A tuple, or a `NamedTuple` of type `type`."""

    type: type | None
    items: tuple[AbstractValue, ...]


@dataclass(frozen=True)
class Items(AbstractValue):
    """A value with items. `item` holds the facts about all items; None if there are no items."""

    item: AbstractValue | None


@dataclass(frozen=True)
class Maybe(AbstractValue):
    """A record or a list with known contents, or None."""

    value: AbstractValue


NONE = ConcreteValue(None, literal=True)
ANY_VALUE = AbstractValue()
SOME_VALUE = Some()


def join(a: AbstractValue, b: AbstractValue) -> AbstractValue:
    """Return the facts that hold for both of two values."""
    if a == b:
        return a
    if (
        isinstance(a, ConcreteValue)
        and isinstance(b, ConcreteValue)
        and ConcreteValue(a.value) == ConcreteValue(b.value)
    ):
        return ConcreteValue(a.value)
    if isinstance(a, Modules) and isinstance(b, Modules):
        return Modules((*a.modules, *(module for module in b.modules if module not in a.modules)))
    if isinstance(a, RecordValue) and isinstance(b, RecordValue) and a.type is b.type and len(a.items) == len(b.items):
        return RecordValue(a.type, tuple(map(join, a.items, b.items)))
    if isinstance(a, Items) and isinstance(b, Items):
        return Items(join(a.item, b.item) if a.item and b.item else a.item or b.item)
    if may_be_none(a) or may_be_none(b):
        contents = [
            without_none(value) for value in (a, b) if not (isinstance(value, ConcreteValue) and value.value is None)
        ]
        content = join_all(contents) if contents else ANY_VALUE
        return Maybe(content) if isinstance(content, RecordValue | Items) else ANY_VALUE
    parts = [item for value in (a, b) if isinstance(value, RecordValue) for item in value.items]
    return Items(ANY_VALUE) if any(map(may_be_none, parts)) else SOME_VALUE


def join_all(values: Iterable[AbstractValue]) -> AbstractValue:
    """Return the facts that hold for all of the values. There must be at least one."""
    return reduce(join, values)


def may_be_none(value: AbstractValue) -> bool:
    """Return True unless a value is known not to be None."""
    return (
        type(value) is AbstractValue
        or isinstance(value, Maybe)
        or (isinstance(value, ConcreteValue) and value.value is None)
    )


def without_none(value: AbstractValue) -> AbstractValue:
    """Return the facts about a value in code where it is not None."""
    return value.value if isinstance(value, Maybe) else SOME_VALUE if type(value) is AbstractValue else value


def is_constant(value: AbstractValue) -> TypeGuard[ConcreteValue]:
    """Return True if a value is a literal."""
    return isinstance(value, ConcreteValue) and value.literal


def truth_value(value: AbstractValue) -> bool | None:
    """Return the truth of a value; None if it is unknown."""
    if isinstance(value, ConcreteValue):
        try:
            return bool(value.value)
        except Exception:  # for instance a tensor of several elements
            return None
    return None


def _is_data(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_data, value))
    return isinstance(value, bool | int | float | str | range)


def fields_of(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a `NamedTuple`."""
    names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    return names


class Records(dict[type, list[AbstractValue]]):
    """The `NamedTuple`s of a model, each with the values of its fields over all instances."""

    def add(self, kind: type, items: list[AbstractValue]) -> RecordValue:
        """Record an instance, and return its value."""
        self[kind] = [join(a, b) for a, b in zip(self.get(kind, items), items, strict=True)]
        return RecordValue(kind, tuple(items))

    def left(self, kind: type) -> list[str]:
        """Return the remaining fields of a `NamedTuple`: fields that are not the same constant in all instances."""
        return [name for name, value in zip(fields_of(kind), self[kind], strict=True) if not is_constant(value)]

    def alone(self, kind: type) -> str | None:
        """Return the single remaining field of a `NamedTuple`, which replaces the tuple; else None."""
        left = self.left(kind) if kind in self else []
        return left[0] if len(left) == 1 else None

"""The other functions of a model, as an expression of one of them sees them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from tfkit.tools.eject.code import Code, Key
from tfkit.tools.eject.values import Record, Value


class Called(Protocol):
    """A function that is called; see `tfkit.tools.eject.statements.Function`."""

    code: Code
    module: nn.Module | None
    name: str
    uses: dict[str, Any]
    needed: set[str]
    attributes: set[str]

    @property
    def parameters(self) -> list[str]: ...

    @property
    def expression(self) -> ast.expr | None: ...

    @property
    def returns(self) -> str | None: ...


class Whole(Protocol):
    """All functions and records of a model; see `tfkit.tools.eject.specialise.Specialiser`."""

    read: dict[nn.Module, set[str]]
    records: dict[type, list[Value]]

    def function(self, key: Key) -> Called: ...

    def call(self, keys: Sequence[Key], arguments: Mapping[str, Value]) -> Value: ...

    def record(self, kind: type, items: list[Value]) -> Record: ...

    def alone(self, kind: type) -> str | None: ...

    def fields(self, kind: type) -> list[str]: ...

"""The values in scope at a config: its own, those around it, and arithmetic over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tfkit.spec import messages
from tfkit.spec.arithmetic import ExpressionError, Number, evaluate
from tfkit.spec.provenance import Path
from tfkit.spec.tree import Node, Scalar


@dataclass(frozen=True, eq=False)
class Given:
    """A value of the spec's text, the path under which it was written, and its scope there."""

    node: Node
    path: Path
    scope: Scope = field(repr=False)


Scope = Mapping[str, Given]


def compute(text: str, scope: Scope, path: Path, used: set[Path]) -> Number:
    """Evaluate the expression at `path`, and add the paths of all values that it uses to `used`.

    Every name has its meaning at the place of the expression. Raises ExpressionError.
    """
    return _Computation(used).value(text, scope, (path,))


class _Computation:
    """Computes each value once, so that a chain of expressions costs no more than its length."""

    def __init__(self, used: set[Path]) -> None:
        self.used = used
        self.known: dict[Path, Number] = {}

    def value(self, text: str, scope: Scope, busy: tuple[Path, ...]) -> Number:
        return evaluate(text, lambda name: self.lookup(name, scope, busy))

    def lookup(self, name: str, scope: Scope, busy: tuple[Path, ...]) -> Number:
        entry = scope.get(name)
        if entry is None:
            raise messages.unknown_name(name, [n for n, named in scope.items() if _is_number(named.node)])
        if entry.path in busy:
            raise messages.circle([path[-1] for path in (*busy[busy.index(entry.path) :], entry.path)])
        self.used.add(entry.path)
        value = entry.node.value if isinstance(entry.node, Scalar) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if not isinstance(value, str) or not _is_expression(entry):
            raise ExpressionError(f"`{name}` is {messages.found(entry.node)}, not a number")
        if entry.path not in self.known:
            self.known[entry.path] = self.value(value, entry.scope, (*busy, entry.path))
        return self.known[entry.path]


def _is_number(node: Node) -> bool:
    return isinstance(node, Scalar) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def _is_expression(value: Given) -> bool:
    """Return True if it is arithmetic, and not just a word."""
    node = value.node
    if not isinstance(node, Scalar) or node.quoted or not isinstance(node.value, str):
        return False
    return not node.value.isidentifier() or node.value in value.scope

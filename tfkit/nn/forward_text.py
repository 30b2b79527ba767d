"""The text of a `forward`, as a person would write it, from its steps."""

from __future__ import annotations

import builtins
import keyword
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

import torch
from torch.nn import functional as F

WIDTH = 116
"""Columns of a line, for the body of an indented class."""
OPERATORS: Mapping[Any, tuple[str, int]] = {
    operator.lt: ("<", -2), operator.le: ("<=", -2), operator.gt: (">", -2), operator.ge: (">=", -2),
    operator.eq: ("==", -2), operator.ne: ("!=", -2), operator.or_: ("|", -1), operator.and_: ("&", 0),
    operator.floordiv: ("//", 2), operator.mod: ("%", 2),
    operator.add: ("+", 1),
    operator.sub: ("-", 1),
    operator.mul: ("*", 2),
    operator.truediv: ("/", 2),
    operator.matmul: ("@", 2),
}  # fmt: skip
"""The sign of an operator, and its precedence."""
ATOM = 3
"""The precedence of a name, a call or an index."""
INDENT = "    "


class Value(str):
    """The value of a step, an argument of later steps."""

    __repr__ = str.__str__  # equal text may be another argument


class Operation(NamedTuple):
    """An operation of a forward: an argument, a call, a weight, or the returned value."""

    op: str
    """The operation in torch.fx's words: placeholder, call_module, call_function, call_method, get_attr or output."""
    name: str
    """The preferred name of its variable."""
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    annotation: Any = None
    """The type of an argument, or of the returned value; None if it is not known."""


class Style(NamedTuple):
    """Limits on the length of a line."""

    calls: int
    """The most calls that are nested."""
    stream: str | None
    """The name for each value that replaces the previous one, which is no longer read."""


LAYER = Style(calls=4, stream="x")
GRAPH = Style(calls=2, stream=None)
"""The nodes of a model keep their names."""


def is_name(text: str) -> bool:
    """Return True if the text is a valid name in Python."""
    return text.isidentifier() and not keyword.iskeyword(text)


def forward_text(steps: Mapping[Value, Operation], outside: dict[str, Any], style: Style) -> str:
    """Return the function `forward`.

    Globals that the text uses are added to `outside` by name; the names already there are not used for anything else.
    The order of steps does not change: a value that is read once is inlined into the line that reads it only if all
    steps with an effect stay in their order.
    """
    return _Writer(steps, outside, style).text()


@dataclass
class _Expression:
    """A value that has no variable yet."""

    text: str
    name: str = ""
    binds: int = ATOM
    calls: int = 0
    """The number of nested calls."""
    reads: list[Value] = field(default_factory=list)
    """The variables in it."""
    broken: tuple[str, list[str]] = ("", [])
    """Of a call that may be too long: the text before its arguments, and the arguments."""


class _Writer:
    def __init__(self, steps: Mapping[Value, Operation], outside: dict[str, Any], style: Style) -> None:
        self.steps = steps
        self.outside = outside
        self.style = style
        self.lines: list[str] = []
        self.held = {name: Value(name) for name in ("self", "forward")}
        """The value that each variable holds at this point."""
        self.variables: dict[Value, str] = {}
        self.operands = {value: list(_values((step.args, step.kwargs))) for value, step in steps.items()}
        self.unpacked = _unpacked(steps) if style.stream else {}
        self.unread = Counter(chain.from_iterable(self.operands.values()))
        """The number of reads of each value that are still to come."""
        self.unread.update(self.held.values())
        self.pending: dict[Value, _Expression] = {}
        """Values that are read once and have no variable yet, in their order."""

    def text(self) -> str:
        inputs = [step for step in self.steps.values() if step.op == "placeholder"]
        for value, step in self.steps.items():
            if step.op == "placeholder":
                self.variables[value] = step.target.lstrip("*")
                self.held[step.target.lstrip("*")] = value
        for value, step in self.steps.items():
            if step.op == "output":
                self._return(value, step)
            elif step.op != "placeholder":
                self._write(value, step)
        parameters = ["self", *map(self._parameter, inputs)]
        head = _broken("def forward(", parameters, f"){self._result()}:", WIDTH)
        return "\n".join([*head, *(INDENT + line for line in self.lines)]) + "\n"

    def _write(self, value: Value, step: Operation) -> None:
        if value in self.variables:
            return
        if not self.unread[value] and (step.op == "get_attr" or step.target is operator.getitem):
            self.unread.subtract(self.operands[value])
            return
        written = self._with_pending(value, partial(self._expression, step))
        if value in self.unpacked:
            self._flush(len(self.pending))
            self._unpack(self.unpacked[value], written)
        elif self.unread[value] == 1:
            self.pending[value] = written
        else:
            self._flush(len(self.pending))
            self._assign(value, written)

    def _with_pending(self, value: Value, write: Callable[[], _Expression]) -> _Expression:
        """Return the expression of a value. Pending values are inlined if they are the last ones, in order."""
        waiting = list(self.pending)
        used = [operand for operand in self.operands[value] if operand in self.pending]
        self._flush(next(n for n in range(len(waiting) + 1) if _ends_with(waiting[n:], used)))
        drawn = [operand for operand in used if operand in self.pending]
        written = write()
        start = "return " if self.style.stream else f"{self.steps[value].name} = "
        bare = len(drawn) == 1 and written is self.pending[drawn[0]]
        long = not bare and len(INDENT + start + written.text) > WIDTH
        if drawn and (long or written.calls > self.style.calls):
            self._flush(max((n for n, operand in enumerate(self.pending.values(), 1) if operand.calls), default=0))
            written = write()
        for operand in drawn:
            self.pending.pop(operand, None)
        return written

    def _flush(self, count: int) -> None:
        """Give the first pending values variables."""
        for value in list(self.pending)[:count]:
            self._assign(value, self.pending.pop(value))

    def _assign(self, value: Value, written: _Expression) -> None:
        self.unread.subtract(written.reads)
        start = ""
        if self.unread[value]:
            self.variables[value] = name = self._variable(written.name)
            self.held[name] = value
            start = f"{name} = "
        self._line(start, written)

    def _unpack(self, parts: Sequence[Value], written: _Expression) -> None:
        self.unread.subtract(written.reads)
        for part in parts:
            self.variables[part] = name = self._variable(self.steps[part].name)
            self.held[name] = part
        self._line(f"{', '.join(self.variables[part] for part in parts)} = ", written)

    def _line(self, start: str, written: _Expression) -> None:
        (before, arguments), columns = written.broken, WIDTH - len(INDENT)
        if arguments and len(start + written.text) > columns:
            self.lines += _broken(start + before, arguments, ")", columns)
        else:
            self.lines.append(start + written.text)

    def _variable(self, name: str) -> str:
        """Return a free variable: the stream's if its value is no longer read, else a numbered name."""
        if self.style.stream and self._is_free(self.style.stream):
            return self.style.stream
        return next(candidate for candidate in _numbered(name) if self._is_free(candidate))

    def _is_free(self, name: str) -> bool:
        if not is_name(name) or name in self.outside or hasattr(builtins, name):
            return False
        return name not in self.held or not self.unread[self.held[name]]

    def _return(self, value: Value, step: Operation) -> None:
        (output,) = step.args
        bare = type(output) is tuple and len(output) > 1
        written = self._with_pending(value, partial(self._sequence if bare else self._part, output))
        self._flush(len(self.pending))
        self._line("return ", written)

    def _expression(self, step: Operation) -> _Expression:
        written = self._of(step)
        written.name = step.name
        return written

    def _of(self, step: Operation) -> _Expression:
        if step.op == "get_attr":
            return _Expression(_path(step.target))
        if step.op == "call_module":
            return self._call(_path(step.target), step.args, step.kwargs)
        if step.op == "call_method":
            owner, *args = step.args
            inner = self._part(owner)
            return self._call(f"{_bracketed(inner, ATOM)}.{step.target}", args, step.kwargs, inner)
        if step.target in OPERATORS and len(step.args) == 2 and not step.kwargs:
            sign, binds = OPERATORS[step.target]
            left, right = map(self._part, step.args)
            text = f"{_bracketed(left, binds)} {sign} {_bracketed(right, binds + 1)}"
            return _joined(text, [left, right], binds=binds)
        if step.target is operator.getitem and len(step.args) == 2:
            left, index = self._part(step.args[0]), self._index(step.args[1])
            return _joined(f"{_bracketed(left, ATOM)}[{index.text}]", [left, index])
        return self._call(self._function(step.target), step.args, step.kwargs)

    def _call(
        self, function: str, args: Sequence[Any], kwargs: Mapping[str, Any], owner: _Expression | None = None
    ) -> _Expression:
        parts = [self._part(argument) for argument in args]
        named = [self._part(argument) for argument in kwargs.values()]
        texts = [argument.text for argument in parts] + [
            f"{n}={argument.text}" for n, argument in zip(kwargs, named, strict=True)
        ]
        call = _joined(f"{function}({', '.join(texts)})", [*([owner] if owner else []), *parts, *named])
        call.calls += 1
        call.broken = f"{function}(", texts
        return call

    def _part(self, value: Any) -> _Expression:
        """Return an argument."""
        if isinstance(value, Value):
            pending = self.pending.get(value)
            return _Expression(self.variables[value], reads=[value]) if pending is None else pending
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._call(self._global(type(value).__name__, type(value)), value, {})
        if isinstance(value, list | tuple):
            sequence = self._sequence(value)
            if isinstance(value, list):
                sequence.text = f"[{sequence.text}]"
            else:
                sequence.text = f"({sequence.text}{',' * (len(value) == 1)})"
            return sequence
        if isinstance(value, dict):
            keys, values = [self._part(item) for item in value], [self._part(item) for item in value.values()]
            inner = ", ".join(f"{key.text}: {item.text}" for key, item in zip(keys, values, strict=True))
            return _joined(f"{{{inner}}}", values)
        if isinstance(value, slice):
            return self._call(self._global("slice", slice), [value.start, value.stop, value.step], {})
        return _Expression(self._constant(value))

    def _sequence(self, values: Sequence[Any]) -> _Expression:
        parts = [self._part(item) for item in values]
        return _joined(", ".join(part.text for part in parts), parts)

    def _index(self, value: Any) -> _Expression:
        """Return the text between square brackets."""
        if type(value) is tuple and len(value) > 1:
            parts = [self._index(item) for item in value]
            return _joined(", ".join(part.text for part in parts), parts)
        if isinstance(value, slice):
            ends = [None if item is None else self._part(item) for item in (value.start, value.stop, value.step)]
            texts = ["" if item is None else item.text for item in ends]
            return _joined(":".join(texts[:2] + texts[2:] * bool(texts[2])), [item for item in ends if item])
        return self._part(value)

    def _constant(self, value: Any) -> str:
        if value is ...:
            return "..."
        if isinstance(value, str):
            return repr(value) if "'" in value or '"' in value else f'"{repr(value)[1:-1]}"'
        if isinstance(value, float) and not math.isfinite(value):
            return f'{self._global("float", float)}("{value}")'
        if value is None or isinstance(value, bool | int | float):
            return repr(value)
        if isinstance(value, torch.dtype):
            return f"{self._global('torch', torch)}.{str(value).removeprefix('torch.')}"
        if callable(value):
            return self._function(value)
        return self._global(type(value).__name__, value)

    def _function(self, function: Any) -> str:
        """Return the name of a function in this text."""
        name = getattr(function, "__name__", type(function).__name__)
        for short, module in (("torch", torch), ("F", F), ("operator", operator)):
            if getattr(module, name, None) is function:
                return f"{self._global(short, module)}.{name}"
        return self._global(name if is_name(name) else "function", function)

    def _global(self, name: str, value: Any) -> str:
        """Return a name for a global that no variable has."""
        free = (
            candidate
            for candidate in _numbered(name)
            if candidate not in self.held and self.outside.get(candidate, value) is value
        )
        self.outside[chosen := next(free)] = value
        return chosen

    def _parameter(self, step: Operation) -> str:
        default = f" = {self._part(step.args[0]).text}" if step.args else ""
        annotation = step.annotation
        if annotation is None:
            return f"{step.target}{default.replace(' ', '')}"
        return f"{step.target}: {self._annotation(annotation)}{default}"

    def _result(self) -> str:
        (output,) = [step for step in self.steps.values() if step.op == "output"]
        annotation, returned = output.annotation, output.args[0]
        fits = (get_origin(annotation) is tuple) == isinstance(returned, tuple)  # not always true in an edited graph
        return f" -> {self._annotation(annotation)}" if annotation is not None and fits else ""

    def _annotation(self, kind: Any) -> str:
        origin, args = get_origin(kind), get_args(kind)
        if kind in (None, NoneType):
            return "None"
        if origin in (Union, UnionType):
            return " | ".join(map(self._annotation, args))
        if origin in (list, tuple, dict) and ... not in args:
            return f"{self._global(origin.__name__, origin)}[{', '.join(map(self._annotation, args))}]"
        if isinstance(kind, type) and origin is None:
            return self._global(kind.__name__, kind)
        return self._global("Annotation", kind)


def _values(parts: Any) -> Iterator[Value]:
    """Yield the values in arguments, in the order in which Python evaluates them."""
    if isinstance(parts, Value):
        yield parts
    elif isinstance(parts, list | tuple):
        for part in parts:
            yield from _values(part)
    elif isinstance(parts, Mapping):
        for part in parts.values():
            yield from _values(part)
    elif isinstance(parts, slice):
        yield from _values((parts.start, parts.stop, parts.step))


def _unpacked(steps: Mapping[Value, Operation]) -> dict[Value, list[Value]]:
    """Return the values that are only taken apart, each with its items in order."""
    readers: dict[Value, list[Value]] = {}
    for value, step in steps.items():
        for operand in _values((step.args, step.kwargs)):
            readers.setdefault(operand, []).append(value)

    def is_item(part: Value, value: Value, index: int) -> bool:
        return steps[part].target is operator.getitem and steps[part].args == (value, index)

    return {
        value: parts
        for value, parts in readers.items()
        if len(parts) > 1 and all(is_item(part, value, index) for index, part in enumerate(parts))
    }


def _ends_with(waiting: Sequence[Value], used: Sequence[Value]) -> bool:
    """Return True if the used values that are pending are the last pending ones, in their order."""
    drawn = [operand for operand in used if operand in waiting]
    return drawn == waiting[len(waiting) - len(drawn) :]


def _joined(text: str, parts: Sequence[_Expression], *, binds: int = ATOM) -> _Expression:
    calls = max((part.calls for part in parts), default=0)
    return _Expression(text, "", binds, calls, [operand for part in parts for operand in part.reads])


def _bracketed(part: _Expression, binds: int) -> str:
    """Return an operand, in parentheses if its precedence is lower."""
    return part.text if part.binds >= binds else f"({part.text})"


def _path(target: str) -> str:
    """Return a child or a parameter, by its dotted path."""
    text = "self"
    for name in target.split("."):
        text = f"{text}.{name}" if is_name(name) else f'getattr({text}, "{name}")'
    return text


def _numbered(name: str) -> Iterator[str]:
    """Yield the name, then the name with a number."""
    yield name
    yield from (f"{name}_{number}" for number in count(1))


def _broken(start: str, parts: Sequence[str], end: str, width: int) -> list[str]:
    """Format a call or a signature on one line, with its arguments on a second line, or with one argument per line."""
    if len(line := f"{start}{', '.join(parts)}{end}") <= width:
        return [line]
    if len(inner := INDENT + ", ".join(parts)) <= width:
        return [start, inner, end]
    return [start, *(f"{INDENT}{part}," for part in parts), end]

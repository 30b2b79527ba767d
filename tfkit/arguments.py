"""Checks the arguments of public functions against their signatures, with errors in the style of spec errors.

    @checked
    def cost(graph: Graph, *, batch: Positive = 1, mode: Literal["train", "decode"] = "train") -> Cost: ...

    >>> cost(graph, bacth=2)
    TypeError: `cost` has no argument `bacth`: one with a similar name is `batch`
    >>> cost(graph, batch=0)
    ValueError: `batch` of `cost` must be an integer of 1 or more; got 0

`Annotated` adds what a type cannot express: the `Limit` of a number, the description for errors, or the class to check
if the annotation is narrower.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin

from tfkit.errors import closest_name, listing, quoted

__tracebackhide__ = True  # pytest shows the caller of a function, not the check of its arguments
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Limit:
    """The range of a number: inclusive bounds `minimum` and `maximum`, exclusive bound `above`."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None

    def holds(self, value: float) -> bool:
        """Return True if a number is within the range."""
        over = (self.minimum is None or value >= self.minimum) and (self.above is None or value > self.above)
        return over and (self.maximum is None or value <= self.maximum)

    def __str__(self) -> str:
        if self == INT64:
            return "64 bits"
        low = None if self.minimum is None else f"{self.minimum:g}" + (" or more" if self.maximum is None else "")
        ends = [low, f"more than {self.above:g}" if self.above is not None else None]
        words = "and at most" if self.minimum is None else "to"
        upper = [] if self.maximum is None else [f"{words} {self.maximum:g}"]
        return " ".join([*(end for end in ends if end), *upper])


DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Names of the dtypes that weights may have."""
INT64 = Limit(minimum=-(2**63), maximum=2**63 - 1)
Positive: TypeAlias = Annotated[int, Limit(minimum=1)]
Natural: TypeAlias = Annotated[int, Limit(minimum=0)]
Seed: TypeAlias = Annotated[int, INT64]
AnyPath: TypeAlias = Annotated[str | os.PathLike[str], "a path"]
Sets: TypeAlias = Annotated[
    str | Mapping[str, Any] | Iterable[str], "'path=value', a list of these, or a mapping of paths to values"
]
"""The type of arguments with changes of a spec."""


_PLUGINS = (
    "load the spec with its plugins, `tfkit.load(spec, plugins=tfkit.load_plugins(plugin_dirs=...))`, or set "
    "TFKIT_PLUGIN_DIR"
)
HINTS = {
    "tfkit explain": "`tfkit show SPEC --prose` explains a spec; `tfkit components SLOT` lists the kinds of a slot",
    "tfkit merge": "`tfkit save FOLDER --layout huggingface -o DIR` merges the adapter in a folder into its model",
    "tfkit resume": "`tfkit train` resumes an interrupted run: repeat the command that began it",
    "train resume": "repeat the same command, or call: it resumes an interrupted run",
    "train lora": "train adapters: `--set weights=DIR --set 'adapters={targets: [q_proj, v_proj], rank: 8}'`",
    "train batch_size": "set the number of sequences in a batch: `--set batch.sequences=N`",
    "plugins": _PLUGINS,
    "plugin_dirs": _PLUGINS,
}
"""Help for commands, options and arguments that users of other tools expect, by the function or command and the name;
or by the name alone, for every function."""


def hint_of(owner: str, name: str) -> str | None:
    """Return the help for a command, an option or an argument that `owner` does not have; None without any."""
    name = name.removeprefix("--").replace("-", "_")
    return HINTS.get(f"{owner} {name}", HINTS.get(name))


def name_of(dtype: object) -> str:
    """Return the name of a torch.dtype as users write it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def checked(function: F) -> F:
    """Wrap a function, or the constructor of a dataclass, so that it rejects arguments that violate its signature.

    Raises:
        TypeError: an argument is unknown, missing, passed twice, or of the wrong type.
        ValueError: an argument is out of range, or not one of the allowed words.
    """
    if isinstance(function, type):
        function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    signature = functools.cache(functools.partial(inspect.signature, function, eval_str=True))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _check_call(name, signature(), args, kwargs)
        return function(*args, **kwargs)

    return cast(F, call)


def _check_call(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(_signature_mismatch(name, signature, args, kwargs) or f"`{name}`: {error}") from None
    for field, value in bound.items():
        parameter = signature.parameters[field]
        if parameter.annotation is inspect.Parameter.empty:
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            for item in value:
                check_argument(name, field, item, parameter.annotation)
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            for key, item in value.items():
                check_argument(name, key, item, parameter.annotation)
        else:
            check_argument(name, field, value, parameter.annotation)


def check_argument(function: str, name: str, value: object, hint: Any) -> None:
    """Raise TypeError or ValueError unless an argument of a function matches its annotation."""
    if is_allowed_value(value, hint):
        return
    near = closest_name(value, _allowed_words(hint)) if isinstance(value, str) else None
    message = f"`{name}` of `{function}` must be {in_words(hint)}; got {value_text(value)}"
    kind = ValueError if is_allowed_value(value, hint, kind_only=True) else TypeError
    raise kind(f"{message}: a similar one is '{near}'" if near else message)


def _signature_mismatch(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """Describe why arguments do not match a signature; None if Python's message is sufficient."""
    parameters = {field: parameter for field, parameter in signature.parameters.items() if field != "self"}
    named = [
        field
        for field, parameter in parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if unknown := [field for field in kwargs if field not in named and not open_ended]:
        return unknown_argument(name, unknown[0], named)
    placed = [field for field, parameter in parameters.items() if parameter.kind in _POSITIONAL]
    count = len(args) - ("self" in signature.parameters)
    if count > len(placed):
        left = [field for field in named if field not in placed]
        help = f": pass the remaining arguments by name, as in `{left[0]}=...`" if left else ""
        return f"`{name}` takes {len(placed)} argument{'s' * (len(placed) != 1)} without a name; got {count}{help}"
    must = [
        field
        for field, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in _VARIADIC
    ]
    missing = [field for field in must if field not in kwargs and field not in placed[:count]]
    return f"`{name}` needs `{missing[0]}`" if missing else None


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def unknown_argument(function: str, name: str, names: Collection[str]) -> str:
    """Describe an argument that a function does not have, and list its arguments."""
    near = closest_name(name, names)
    help = hint_of(function, name)
    if help is None:
        similar = f"an argument with a similar name is `{near}`"
        help = similar if near else f"it has {listing(names, 20) or 'none by name'}"
    subject = f"`{function}`" if function.isidentifier() else function
    return f"{subject} has no argument {quoted(name)}: {help}"


def is_allowed_value(value: object, hint: Any, *, kind_only: bool = False) -> bool:
    """Return True if a value matches an annotation; with `kind_only`, if its type matches."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [] if kind_only else [argument for argument in args[1:] if isinstance(argument, Limit)]
        classes = tuple(argument for argument in args[1:] if isinstance(argument, type))
        inner = isinstance(value, classes) if classes else is_allowed_value(value, args[0], kind_only=kind_only)
        return inner and all(limit.holds(cast(float, value)) for limit in limits)
    if origin in (Union, types.UnionType):
        return any(is_allowed_value(value, argument, kind_only=kind_only) for argument in args)
    if origin is Literal:
        same = any(type(value) is type(argument) and value == argument for argument in args)
        return same or (kind_only and isinstance(value, str))
    if origin is None:
        return _is_a(value, hint, kind_only)
    if issubclass(origin, Mapping):
        pairs = value.items() if isinstance(value, Mapping) else ()
        return isinstance(value, Mapping) and all(
            is_allowed_value(k, args[0]) and is_allowed_value(v, args[1]) for k, v in pairs
        )
    if issubclass(origin, Iterable):
        return _is_several(value, origin, args)
    return isinstance(value, origin)


def _is_a(value: object, hint: Any, kind_only: bool) -> bool:
    """Implement `is_allowed_value` for a plain type."""
    if hint is Any:
        return True
    if hint is None:
        return value is None
    if hint is int:
        return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    if hint is float:
        return not isinstance(value, bool) and isinstance(value, Real) and (kind_only or math.isfinite(value))
    return isinstance(value, hint)


def _is_several(value: object, origin: type, args: tuple[Any, ...]) -> bool:
    """Implement `is_allowed_value` for containers.

    The items of an iterator are not checked, because they can be read only once.
    """
    if not isinstance(value, origin) or isinstance(value, str | bytes | Mapping):
        return False
    return not isinstance(value, Collection) or not args or all(is_allowed_value(item, args[0]) for item in value)


_WORDS: dict[Any, str] = {
    Any: "anything",
    bool: "True or False",
    float: "a number",
    int: "an integer",
    None: "None",
    type(None): "None",
    str: "a string",
}


def in_words(hint: Any) -> str:
    """Describe the values that an annotation allows."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if origin is Annotated:
        texts = [argument for argument in args[1:] if isinstance(argument, str)]
        return texts[0] if texts else " of ".join([in_words(args[0]), *map(str, args[1:])])
    if origin in (Union, types.UnionType):
        words = list(dict.fromkeys(in_words(argument) for argument in args))
        return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}" if len(args) > 1 else repr(args[0])
    if origin is not None and issubclass(origin, Callable):  # type: ignore[arg-type]
        return "a function"
    if origin is not None and issubclass(origin, Mapping):
        return f"a mapping of {in_words(args[0])} to {in_words(args[1])}"
    if origin is not None and issubclass(origin, Iterable):
        return f"a list whose items are each {in_words(args[0])}"
    return _with_article((origin or hint).__name__)


def _allowed_words(hint: Any) -> list[str]:
    """Return the words that an annotation allows."""
    if get_origin(hint) is Literal:
        return [argument for argument in get_args(hint) if isinstance(argument, str)]
    return [
        word
        for argument in get_args(hint)
        if get_origin(argument) or argument is hint
        for word in _allowed_words(argument)
    ]


def value_text(value: object) -> str:
    """Format a value for an error: the value if it is short, else its type."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value) if len(repr(value)) < 40 else _with_article(type(value).__name__)
    if isinstance(value, str):
        return quoted(repr(value)).strip("`")
    if isinstance(value, type):
        return f"the class {value.__name__}"
    more = ", ..." if isinstance(value, list | tuple) and len(value) > 1 else ""
    inside = f" of {value_text(value[0])}{more}" if isinstance(value, list | tuple) and value else ""
    name, module = type(value).__name__, type(value).__module__
    hides = name in vars(builtins) and module != "builtins"  # numpy.bool
    return _with_article(f"{module}.{name}" if hides else name) + inside


def _with_article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"

"""The values that the annotation of a field allows: configs, numbers, words."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tfkit.component import Config, WireMarker


@dataclass(frozen=True)
class ConfigShape:
    """The class of the configs that a field holds, and the container around them."""

    config: type[Config]
    container: Literal["one", "list", "dict"]
    null: bool
    boolean: bool


def shape_of(annotation: Any) -> ConfigShape | None:
    """Return the shape of a field that holds configs; None for any other field."""
    members = union_members(annotation)
    for member in members:
        arguments, option = [a for a in get_args(member) if a is not Ellipsis], member
        container: Literal["one", "list", "dict"] = "one"
        if get_origin(member) in (tuple, list) or get_origin(member) is dict:
            container = "dict" if get_origin(member) is dict else "list"
            option = union_members(arguments[-1])[0]
        if isinstance(option, type) and issubclass(option, Config):
            return ConfigShape(option, container, type(None) in members, bool in members)
    return None


def union_members(annotation: Any) -> list[Any]:
    """Return the members of a union, without their annotations."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [o for argument in get_args(annotation) for o in union_members(argument)]
    if hasattr(annotation, "__metadata__"):
        return union_members(get_args(annotation)[0])
    return [annotation]


def numbers_and_words(annotation: Any) -> tuple[set[type], set[object]]:
    """Return the number types of a field, and the words that it accepts in addition."""
    numbers: set[type] = set()
    words: set[object] = set()
    for option in union_members(annotation):
        if option in (int, float):
            numbers.add(option)
        elif get_origin(option) is Literal:
            words |= set(get_args(option))
        elif get_origin(option) is dict:
            numbers |= numbers_and_words(get_args(option)[1])[0]
    return numbers, words


def slot_setting(info: FieldInfo, key: str) -> str | None:
    """Return the `default_kind` or the `implied_kind` that `tfkit.slot` or `tfkit.optional_slot` set for a field."""
    settings = info.json_schema_extra
    return str(settings[key]) if isinstance(settings, dict) and key in settings else None


def allowed_values(info: FieldInfo, *, nested: int) -> list[str]:
    """Describe each type of value that a field accepts; with `nested`, the values of its items at that depth."""
    annotation = info.annotation if nested else Annotated[info.annotation, info]
    for _ in range(nested):
        items = [get_args(option) for option in union_members(annotation) if get_origin(option) in (dict, tuple, list)]
        annotation = items[0][-1 if len(items[0]) == 2 and items[0][-1] is not Ellipsis else 0] if items else Any
    return list(dict.fromkeys(_member_words(annotation, {})))


def joined_with_or(words: list[str]) -> str:
    """Join words: `a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _member_words(annotation: Any, bounds: dict[str, float]) -> list[str]:
    """Describe the members of an annotation; `bounds` come from the annotation around it."""
    if hasattr(annotation, "__metadata__"):
        return _member_words(get_args(annotation)[0], {**bounds, **_metadata_bounds(annotation.__metadata__)})
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return [word for argument in arguments for word in _member_words(argument, bounds)]
    if origin is Literal:
        return [f"`{word}`" if isinstance(word, str) else str(word) for word in arguments]
    if annotation in (int, float):
        return [f"an integer{_range_text(bounds, 1)}" if annotation is int else f"a number{_range_text(bounds)}"]
    plain = {bool: ["true", "false"], str: ["the name of a node" if "wire" in bounds else "text"], type(None): []}
    return plain.get(annotation, ["a list"] if origin in (tuple, list) else ["a mapping"])


def _metadata_bounds(metadata: Any) -> dict[str, float]:
    """Return the limits of an annotation under pydantic's names, with the additional key `wire` for a wire."""
    bounds: dict[str, float] = {}
    for part in metadata:
        if isinstance(part, FieldInfo):
            bounds |= _metadata_bounds(part.metadata)
        elif isinstance(part, WireMarker):
            bounds["wire"] = 1
        bounds |= {name: getattr(part, name) for name in ("gt", "ge", "lt", "le") if hasattr(part, name)}
    return bounds


def _range_text(bounds: dict[str, float], step: int | None = None) -> str:
    """Describe the limits. An integer, which has a `step`, starts at least one step above an exclusive bound."""
    low, high = bounds.get("ge"), bounds.get("le")
    if low is None and step is not None and "gt" in bounds:
        low = bounds["gt"] + step
    if low is not None and high is not None:
        return f" from {low:,} to {high:,}"
    words = [f"of at least {low:,}"] if low is not None else [f"above {bounds['gt']:,}"] if "gt" in bounds else []
    words += [f"of at most {high:,}"] if high is not None else [f"below {bounds['lt']:,}"] if "lt" in bounds else []
    return f" {' and '.join(words)}" if words else ""

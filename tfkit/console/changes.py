"""The changes of a spec that `--set` could make, found from their first characters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfkit.component import Component, Config
from tfkit.graph.expand import Graph
from tfkit.plugin.manager import Plugins
from tfkit.spec.annotations import allowed, shape_of

ELSEWHERE = frozenset({"tfkit", "graph", "checkpoint"})
"""Keys at the top that are no use in a change, or, as `graph`, are left out of its path."""


@dataclass(frozen=True)
class Place:
    """A value of a spec, and the words that it could be."""

    value: Any
    words: tuple[str, ...] = ()


def changes(graph: Graph, plugins: Plugins, start: str) -> list[str]:
    """The changes that begin with `start`: paths up to the next dot; or, after `=`, each with a value.

    A path that is the only one is continued, up to the value that it has.
    """
    path, equals, _ = start.partition("=")
    around, dot, part = path.rpartition(".")
    places = _top(graph, plugins)
    for name in around.split(".") if dot else ():
        places = _inside(places[name].value, plugins) if name in places else {}
    found = {f"{around}{dot}{name}": place for name, place in places.items() if name.startswith(part)}
    if equals:
        return [one for one in _assigned(path, found[path]) if one.startswith(start)] if path in found else []
    if len(found) != 1:
        return [f"{name}{'.' if _inside(place.value, plugins) else '='}" for name, place in found.items()]
    ((name, place),) = found.items()
    return changes(graph, plugins, f"{name}.") if _inside(place.value, plugins) else _assigned(name, place)


def _assigned(path: str, place: Place) -> list[str]:
    """A path with each word that its value could be; if any value could be, without one and with the present one."""
    if place.words:
        return [f"{path}={word}" for word in place.words]
    plain = place.value is None or isinstance(place.value, str | int | float)
    return [f"{path}=", *([f"{path}={json.dumps(place.value)}"] if plain else [])]


def _top(graph: Graph, plugins: Plugins) -> dict[str, Place]:
    """The nodes, the keys at the top of a spec, and those that its components share."""
    model = graph.spec.model
    shared = {name: Place(_first(name, model.graph, plugins)) for name in sorted(plugins.registry.shared_names())}
    own = {name: place for name, place in _inside(model, plugins).items() if name not in ELSEWHERE}
    return {**_inside(model.graph, plugins), **shared, **own}


def _first(name: str, value: Any, plugins: Plugins) -> Any:
    """The value of that name in the first config that has one; None without any."""
    inside = _inside(value, plugins)
    if name in inside and inside[name].value is not None:
        return inside[name].value
    found = (_first(name, place.value, plugins) for place in inside.values())
    return next((one for one in found if one is not None), None)


def _inside(value: Any, plugins: Plugins) -> dict[str, Place]:
    """The values in a config or in a mapping of configs; none in any other value."""
    if isinstance(value, Config):
        return {name: Place(one, _words(type(value), name, plugins)) for name, one in value}
    if isinstance(value, Mapping) and all(isinstance(one, Config) for one in value.values()):
        return {name: Place(one) for name, one in value.items()}
    return {}


def _words(cls: type[Config], name: str, plugins: Plugins) -> tuple[str, ...]:
    """The words that a field takes: kinds, or those of its annotation."""
    info = cls.model_fields[name]
    shape = shape_of(info.annotation)
    if issubclass(cls, Component) and name == cls.word_key:
        return tuple(plugins.registry.kinds(cls.slot))
    if shape is None:
        words = allowed(info, nested=0)
        return tuple(word.strip("`") for word in words if word[0] == "`" or word in ("true", "false"))
    if shape.container != "one" or not issubclass(shape.config, Component):
        return ()
    more = ["none"] * shape.null + ["true", "false"] * shape.boolean
    return (*plugins.registry.kinds(shape.config.slot, shape.config), *more)

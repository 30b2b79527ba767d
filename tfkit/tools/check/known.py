"""The properties of tfkit and of all plugins, by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tfkit.errors import Diagnostic, SpecError, closest, quoted
from tfkit.plugin.manager import Plugins
from tfkit.tools.check.measure import Level, Property
from tfkit.tools.check.properties.all import PROPERTIES


@dataclass(frozen=True)
class Known:
    """The properties, and a warning for each plugin whose hook failed."""

    properties: tuple[Property, ...]
    faults: tuple[Diagnostic, ...] = ()

    def chosen(self, names: Sequence[str] = (), level: Level = "full") -> tuple[Property, ...]:
        """Return the properties with these names, or all of a level; raise SpecError for an unknown name."""
        by_name = {prop.name: prop for prop in self.properties}
        for name in names:
            if name not in by_name:
                near = closest(name, by_name)
                help = f"one with a similar name exists: `{near}`" if near else f"they are: {', '.join(by_name)}"
                raise SpecError(Diagnostic(f"there is no property {quoted(name)}", help=help))
        if names:
            return tuple(prop for prop in self.properties if prop.name in names)
        return tuple(prop for prop in self.properties if level == "full" or prop.level == "quick")


OWN = Known(PROPERTIES)
"""The properties of tfkit."""


def properties_of(plugins: Plugins) -> Known:
    """Return the properties of tfkit and of plugins; raise SpecError if two share a name."""
    answers = plugins.hooks.call("tfkit_properties", _properties)
    owners = {prop.name: "tfkit" for prop in PROPERTIES}
    properties = [*PROPERTIES]
    for plugin, returned in answers.values:
        for prop in returned:
            if prop.name in owners:
                notes = (f"from {owners[prop.name]}", f"from {plugin}")
                raise SpecError(Diagnostic(f"two properties have the name `{prop.name}`", notes=notes))
            owners[prop.name] = plugin
            properties.append(prop)
    return Known(tuple(properties), answers.faults)


def _properties(returned: object) -> list[Property]:
    """Return the reader of the hook."""
    return [_property(item) for item in (returned if isinstance(returned, Iterable) else [returned])]


def _property(item: object) -> Property:
    if not isinstance(item, Property):
        raise TypeError(f"returned {type(item).__name__}, not a list of tfkit.Property")
    return item

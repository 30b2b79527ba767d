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
        """The properties of these names, or all of a level; raises SpecError for a name that there is not."""
        found = {one.name: one for one in self.properties}
        for name in names:
            if name not in found:
                near = closest(name, found)
                help = f"one with a similar name exists: `{near}`" if near else f"they are: {', '.join(found)}"
                raise SpecError(Diagnostic(f"there is no property {quoted(name)}", help=help))
        if names:
            return tuple(one for one in self.properties if one.name in names)
        return tuple(one for one in self.properties if level == "full" or one.level == "quick")


OWN = Known(PROPERTIES)
"""Those of tfkit itself."""


def properties_of(plugins: Plugins) -> Known:
    """The properties of these plugins, after tfkit's own; raises SpecError for two of one name."""
    answers = plugins.hooks.call("tfkit_properties", _properties)
    owners = {one.name: "tfkit" for one in PROPERTIES}
    found = [*PROPERTIES]
    for plugin, given in answers.given:
        for one in given:
            if one.name in owners:
                notes = (f"from {owners[one.name]}", f"from {plugin}")
                raise SpecError(Diagnostic(f"two properties have the name `{one.name}`", notes=notes))
            owners[one.name] = plugin
            found.append(one)
    return Known(tuple(found), answers.faults)


def _properties(returned: object) -> list[Property]:
    """The reader of the hook."""
    return [_property(one) for one in (returned if isinstance(returned, Iterable) else [returned])]


def _property(one: object) -> Property:
    if not isinstance(one, Property):
        raise TypeError(f"returned {type(one).__name__}, not a list of tfkit.Property")
    return one

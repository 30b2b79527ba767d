"""The plugins that a spec names in `requires`, with the versions that it needs: `tfkit-moe`, `tfkit-moe>=0.2`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from tfkit.plugin.discover import canonical


def parsed(text: str) -> Requirement:
    """The requirement; raises ValueError for anything but a name and versions."""
    try:
        found = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError("it is not the name of a plugin, with versions or without") from error
    if found.extras or found.marker or found.url:
        raise ValueError("it says more than the name of a plugin and its versions")
    return found


def fits(wanted: Requirement, version: str) -> bool:
    """True if a plugin of this version is good enough; one without a version is if any version is."""
    try:
        return not wanted.specifier or wanted.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def with_versions(required: Iterable[str], built_with: Mapping[str, str]) -> tuple[str, ...]:
    """The requirements of a spec, and beside them that no plugin is older than the one that it was built with.

    `built_with` are the versions of the plugins whose components the model has; empty for a plugin without one.
    """
    wanted = {canonical(one.name): one for one in map(parsed, required)}
    for name, version in built_with.items():
        try:
            one = wanted.setdefault(canonical(name), Requirement(name))
            one.specifier &= SpecifierSet(f">={Version(version).public}")
        except (InvalidRequirement, InvalidVersion):  # a file with an odd name, or a plugin without a version
            continue
    return tuple(str(one) for one in wanted.values())

"""Requirements of a spec: the plugins in `requires`, with their versions: `tfkit-moe`, `tfkit-moe>=0.2`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from tfkit.plugin.discover import normalized_name


def parse_requirement(text: str) -> Requirement:
    """Parse a requirement; raise ValueError for anything but a name and versions."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError("it is not the name of a plugin, with versions or without") from error
    if requirement.extras or requirement.marker or requirement.url:
        raise ValueError("it must contain only the name of a plugin and its versions")
    return requirement


def is_satisfied(requirement: Requirement, version: str) -> bool:
    """Return True if the version satisfies the requirement. An unknown version, `""`, satisfies only a bare name."""
    try:
        return not requirement.specifier or requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def with_versions(required: Iterable[str], built_with: Mapping[str, str]) -> tuple[str, ...]:
    """Return the requirements of a spec, each with the plugin's version at build time as the minimum version.

    `built_with` contains the versions of the plugins whose components the model has; empty for a plugin without a
    version.
    """
    requirements = {normalized_name(requirement.name): requirement for requirement in map(parse_requirement, required)}
    for name, version in built_with.items():
        try:
            requirement = requirements.setdefault(normalized_name(name), Requirement(name))
            requirement.specifier &= SpecifierSet(f">={Version(version).public}")
        except (InvalidRequirement, InvalidVersion):  # a file with an odd name, or a plugin without a version
            continue
    return tuple(str(requirement) for requirement in requirements.values())

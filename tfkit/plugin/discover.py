"""The sources of plugins: installed distributions, and the folders of `--plugin-dir` and TFKIT_PLUGIN_DIR.

No plugin code runs during the search. Each plugin becomes a `Candidate`, whose `load` imports it later. An error in a
plugin, such as an invalid pyproject.toml, is raised only then, and affects only that plugin.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.machinery import PathFinder
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    distribution,
    distributions,
    entry_points,
    version,
)
from pathlib import Path
from typing import Any, TypeAlias

from tfkit.errors import Diagnostic, SpecError
from tfkit.plugin.import_code import load_file, load_points

GROUP, SPECS, COMMANDS, DOCUMENTS = "tfkit", "tfkit.specs", "tfkit.commands", "tfkit.documents"
"""Groups of entry points: modules with hooks, folders of specs, commands, and folders of documents."""
GROUPS = (GROUP, SPECS, COMMANDS, DOCUMENTS)
Objects: TypeAlias = Iterable[tuple[str, object]]
PLUGIN_DIR = "TFKIT_PLUGIN_DIR"
DISABLE = "TFKIT_DISABLE"
BUILT_IN, ENTRY_POINT = "built in", "entry point"
LAYOUTS = "a *.py file, a package, or a project whose pyproject.toml has [project.entry-points.tfkit]"
LEFT_ALONE = re.compile(r"[._].*|test_.*|tests|conftest\.py|setup\.py")


def tfkit_version() -> str:
    """Return the version of tfkit; empty if it is not installed."""
    try:
        return version("tfkit")
    except PackageNotFoundError:
        return ""


TFKIT = "tfkit"
"""The distribution of tfkit itself, whose entry points are no plugin."""


@dataclass(frozen=True)
class Candidate:
    """A plugin before it is loaded. `load` imports it and returns the objects with hooks, usually modules."""

    name: str
    version: str
    origin: str
    load: Callable[[], Sequence[object]]
    label: str
    """The name in messages: `tfkit-additive 0.1.0`, or the path of a plugin that is not a distribution."""
    points: tuple[EntryPoint, ...] = ()
    folders: tuple[str, ...] | None = None
    """The folders of its modules; None if Python's path applies."""

    def named(self, group: str) -> list[EntryPoint]:
        """Return the entry points of the plugin in a group."""
        return [point for point in self.points if point.group == group]


def enabled_plugins(
    plugin_dirs: Iterable[Path], ambient: bool, objects: Objects = ()
) -> tuple[list[Candidate], tuple[str, ...]]:
    """Return the enabled plugins that `find_plugins` finds, and the names of the disabled plugins.

    Raises SpecError for two plugins with the same name, which could not be disabled separately.
    """
    candidates = find_plugins(plugin_dirs, ambient, objects)
    off = switched_off()
    names = tuple(dict.fromkeys(candidate.name for candidate in candidates if normalized_name(candidate.name) in off))
    left = [candidate for candidate in candidates if normalized_name(candidate.name) not in off]
    _check_names(left)
    return left, names


def tfkit_itself() -> Candidate:
    """Return tfkit with the entry points that it declares as a plugin does; raise SpecError if there are none.

    A source tree declares them in its pyproject.toml. The metadata of an editable installation would lack a command
    that was added since the installation.
    """
    file = Path(__file__).parents[2] / "pyproject.toml"
    project, points = _read_project(file) if file.is_file() else ({}, [])
    if project.get("name") != TFKIT:
        try:
            points = [point for point in distribution(TFKIT).entry_points if point.group in GROUPS]
        except PackageNotFoundError:
            help = "install tfkit: its metadata lists its commands"
            raise SpecError(Diagnostic("tfkit is not installed, and not in its source tree", help=help)) from None
    return Candidate(TFKIT, "", BUILT_IN, list, TFKIT, tuple(points))


def switched_off() -> set[str]:
    """Return the canonical names of disabled plugins, which need not exist."""
    return {normalized_name(name) for name in os.environ.get(DISABLE, "").split(",")}


def _check_names(candidates: Iterable[Candidate]) -> None:
    named: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        named.setdefault(normalized_name(candidate.name), []).append(candidate)
    help = "rename or remove one of the plugins"
    problems = [
        Diagnostic(
            f"there are {len(group)} plugins named `{group[0].name}`",
            notes=tuple(" ".join(filter(None, [candidate.version, candidate.origin])) for candidate in group),
            help=help,
        )
        for group in named.values()
        if len(group) > 1
    ]
    if problems:
        raise SpecError(*problems)


def find_plugins(plugin_dirs: Iterable[Path], ambient: bool, objects: Objects = ()) -> list[Candidate]:
    """Find the plugins in `plugin_dirs`; if `ambient`, also the installed plugins and those in TFKIT_PLUGIN_DIR.

    `objects` are plugins with their names.

    A later plugin replaces an earlier plugin of the same name.
    """
    candidates = _installed_plugins() if ambient else []
    if ambient:
        candidates = _with_replacements(
            candidates,
            [replace(candidate, origin=f"{candidate.origin}, by {PLUGIN_DIR}") for candidate in _from_environment()],
        )
    registered = [Candidate(name, "", "object", partial(list, [part]), name) for name, part in objects]
    return _with_replacements(candidates, [*_in_folders(plugin_dirs), *registered])


def _with_replacements(candidates: Sequence[Candidate], later: Iterable[Candidate]) -> list[Candidate]:
    before = {normalized_name(candidate.name): candidate for candidate in candidates}
    remaining = []
    for candidate in later:
        other = before.pop(normalized_name(candidate.name), None)
        if other is not None and other.version != candidate.version:
            location = "installed" if other.origin.startswith(ENTRY_POINT) else other.origin
            origin = f"{candidate.origin} (instead of {other.version}, {location})"
            remaining.append(replace(candidate, origin=origin))
        else:
            remaining.append(candidate)
    return [*before.values(), *remaining]


def _from_environment() -> list[Candidate]:
    """Find the plugins in the folders of TFKIT_PLUGIN_DIR, which must be absolute paths."""
    folders = [
        Path(folder).expanduser() for folder in os.environ.get(PLUGIN_DIR, "").split(os.pathsep) if folder.strip()
    ]
    relative = [folder for folder in folders if not folder.is_absolute()]
    if relative:
        help = "write an absolute path: a relative path would run code from the current folder"
        raise SpecError(
            *(Diagnostic(f"{PLUGIN_DIR} must contain absolute paths; got `{folder}`", help=help) for folder in relative)
        )
    return _in_folders(folders, notes=(f"named in {PLUGIN_DIR}",))


def lying_in(folders: Iterable[Path]) -> dict[str, Path]:
    """Return the paths of readable plugins in these folders, by canonical name, without running their code."""
    paths: dict[str, Path] = {}
    for folder in folders:
        with suppress(OSError):
            for path in _plugin_paths(folder):
                paths.setdefault(normalized_name(_candidate_of_path(path).name), path)
    return paths


def normalized_name(name: str) -> str:
    """Normalize a name as package indexes do: lower case, with `-` for any run of `-`, `_` and `.`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _installed_plugins() -> list[Candidate]:
    """Return the installed plugins. The search is repeated only if a distribution may have changed."""
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return _search_installed()  # an application's finder may return different distributions at any time
    return _installed_in(tuple(map(_state_of, sys.path)))


@lru_cache(maxsize=1)
def _installed_in(states: tuple[object, ...]) -> list[Candidate]:
    return _search_installed()


def _state_of(folder: str) -> tuple[object, ...]:
    """Return a value that changes whenever the metadata of the distributions in a folder or an archive changes."""
    folder = os.path.abspath(folder)
    try:
        with os.scandir(folder) as entries:
            metadata = [entry.path for entry in entries if entry.name.lower().endswith(("dist-info", "egg-info"))]
    except OSError:
        return folder, _version_of(folder)
    # Installers write a new folder; only builds of editable egg-info change files in place.
    files = [name for path in metadata for name in (path, f"{path}/entry_points.txt")]
    files += [f"{path}/PKG-INFO" for path in metadata if path.lower().endswith("egg-info")]
    return folder, tuple(metadata), *map(_version_of, files)


def _version_of(path: str) -> tuple[int, int, int] | None:
    """Return the inode, size and modification time of a file; None if it does not exist."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns


def _search_installed() -> list[Candidate]:
    """Search the metadata. The properties of a distribution parse its file each time, so it is parsed once here."""
    points: dict[Distribution | str, list[EntryPoint]] = {}
    all_points = entry_points()
    for point in sorted(
        (entry for group in GROUPS for entry in all_points.select(group=group)), key=lambda point: point.name
    ):
        points.setdefault(point.dist or point.name, []).append(point)
    candidates = []
    for owner, group in points.items():
        metadata = {"Name": owner, "Version": ""} if isinstance(owner, str) else owner.metadata
        name, version = str(metadata["Name"]), str(metadata["Version"])
        if name != TFKIT:
            candidates.append(
                _distribution_candidate(name, version, f"{ENTRY_POINT}{_ignored_versions(name, version)}", group, None)
            )
    return sorted(candidates, key=lambda candidate: candidate.name)


def _ignored_versions(name: str, version: str) -> str:
    """Describe the versions of a distribution that Python ignores: it uses the first version in its path."""
    versions = {other.version: other for other in distributions(name=name)}
    ignored = {number: other.locate_file("") for number, other in versions.items() if number != version}
    return "".join(f" (instead of {number}, in {folder})" for number, folder in ignored.items())


def _distribution_candidate(
    name: str, version: str, origin: str, points: Sequence[EntryPoint], folders: tuple[str, ...] | None
) -> Candidate:
    load = partial(load_points, [point for point in points if point.group == GROUP], folders)
    return Candidate(name, version, origin, load, f"{name} {version}".rstrip(), tuple(points), folders)


def _in_folders(plugin_dirs: Iterable[Path], notes: tuple[str, ...] = ()) -> list[Candidate]:
    """Return the plugins in folders, without duplicates; raise `SpecError` for folders without a plugin."""
    candidates: dict[Path, Candidate] = {}
    problems = []
    for folder in map(Path, plugin_dirs):
        try:
            paths = _plugin_paths(folder)
        except OSError as error:
            problems.append(Diagnostic(f"plugin folder `{folder}` cannot be read: {error.strerror}", notes=notes))
            continue
        candidates |= {path.resolve(): _candidate_of_path(path) for path in paths if path.resolve() not in candidates}
        if not paths:
            problem = "contains no plugin" if os.path.exists(folder) else "does not exist"
            problems.append(
                Diagnostic(f"plugin folder `{folder}` {problem}", notes=notes, help=f"use a folder with {LAYOUTS}")
            )
    if problems:
        raise SpecError(*problems)
    return list(candidates.values())


def _plugin_paths(path: Path) -> list[Path]:
    """Return `path` itself if it is a plugin, otherwise the plugins directly below it."""
    if _is_plugin(path):
        return [path]
    inside = sorted(path.iterdir()) if os.path.isdir(path) else []
    candidates = [child for child in inside if not LEFT_ALONE.fullmatch(child.name)]
    return [child for child in candidates if _is_plugin(child) or (child / "pyproject.toml").is_file()]


def _is_plugin(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".py"
    return (path / "__init__.py").is_file() or _names_modules(path / "pyproject.toml")


def _names_modules(file: Path) -> bool:
    """Return True if a project is a plugin, or cannot be read, in which case loading it raises the error."""
    try:
        project, points = _read_project(file) if file.is_file() else ({}, [])
        return bool(points) and project.get("name") != TFKIT
    except (OSError, ValueError, AttributeError):
        return True


def _read_project(file: Path) -> tuple[dict[str, Any], list[EntryPoint]]:
    """Read the project in a pyproject.toml, and its entry points in tfkit's groups."""
    project: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    groups = project.get("entry-points", {})
    points = [(key, value, group) for group in GROUPS for key, value in groups.get(group, {}).items()]
    for key, value, group in points:
        if not isinstance(value, str):
            raise ValueError(f'the group must be quoted, as in [project.entry-points."{group}.{key}"]')
    return project, [EntryPoint(*point) for point in points]


def _candidate_of_path(path: Path) -> Candidate:
    file, resolved = path / "pyproject.toml", path.resolve()
    if path.is_file() or (not _names_modules(file) and (path / "__init__.py").is_file()):
        name = resolved.stem if path.is_file() else resolved.name
        return Candidate(name, "", str(path), partial(load_file, path), str(path))
    try:
        project, points = _read_project(file)
        if not points:
            raise ValueError(f"it has no [project.entry-points.{GROUP}]")
    except (OSError, ValueError, AttributeError) as error:
        return Candidate(resolved.name, "", str(path), partial(_raise_import_error, file, error), str(path))
    name, version = str(project.get("name", resolved.name)), str(project.get("version", ""))
    folders = tuple(str(folder.resolve()) for folder in (path / "src", path) if folder.is_dir())
    return _distribution_candidate(name, version, str(path), points, folders)


def _raise_import_error(file: Path, error: Exception) -> Sequence[object]:
    raise ImportError(f"{file}: {error}") from error

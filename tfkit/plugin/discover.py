"""The sources of plugins: installed distributions, and the folders of `--plugin-dir` and TFKIT_PLUGIN_DIR.

No plugin code runs during the search. Each plugin becomes a `Candidate`, whose `load` imports it later; an error in one
plugin (a broken pyproject.toml, too) shows then, and affects only that plugin.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint, PackageNotFoundError, distributions, entry_points, version
from pathlib import Path
from typing import Any

from tfkit.errors import Diagnostic, SpecError, listing, similar
from tfkit.plugin.import_code import load_file, load_points

GROUP, SPECS, COMMANDS = "tfkit", "tfkit.specs", "tfkit.commands"
"""The groups of entry points: modules with hooks, folders of specs, and modules that are commands."""
GROUPS = (GROUP, SPECS, COMMANDS)
PLUGIN_DIR = "TFKIT_PLUGIN_DIR"
DISABLE = "TFKIT_DISABLE"
BUILT_IN, ENTRY_POINT = "built in", "entry point"
LAYOUTS = "a *.py file, a package, or a project whose pyproject.toml has [project.entry-points.tfkit]"
LEFT_ALONE = re.compile(r"[._].*|test_.*|tests|conftest\.py|setup\.py")


def own_version() -> str:
    """The version of tfkit; empty if it runs without being installed."""
    try:
        return version("tfkit")
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Candidate:
    """A plugin that was found: `load` imports it and returns the objects, usually modules, that have hooks."""

    name: str
    version: str
    origin: str
    load: Callable[[], Sequence[object]]
    label: str
    """Its name in messages: `tfkit-additive 0.1.0`, or the path of a plugin that is not a distribution."""
    points: tuple[EntryPoint, ...] = ()
    folders: tuple[str, ...] | None = None
    """The places of its modules; those of any other module if None."""

    def named(self, group: str) -> list[EntryPoint]:
        """Its entry points in a group."""
        return [point for point in self.points if point.group == group]


def wanted(
    plugin_dirs: Iterable[Path], ambient: bool, disabled: Collection[str]
) -> tuple[list[Candidate], tuple[str, ...]]:
    """The plugins that were found and are not switched off, see `find_plugins`; and the names of those that are.

    Raises SpecError for two of one name: nobody could switch off one of them.
    """
    found = find_plugins(plugin_dirs, ambient)
    off = _switched_off([one.name for one in found], disabled)
    names = tuple(dict.fromkeys(one.name for one in found if canonical(one.name) in off))
    left = [one for one in found if canonical(one.name) not in off]
    _check_names(left)
    return left, names


def _check_names(found: Iterable[Candidate]) -> None:
    named: dict[str, list[Candidate]] = {}
    for one in found:
        named.setdefault(canonical(one.name), []).append(one)
    help = "rename one, or move it away"
    problems = [
        Diagnostic(
            f"there are {len(some)} plugins named `{some[0].name}`",
            notes=tuple(" ".join(filter(None, [one.version, one.origin])) for one in some),
            help=help,
        )
        for some in named.values()
        if len(some) > 1
    ]
    if problems:
        raise SpecError(*problems)


def find_plugins(plugin_dirs: Iterable[Path], ambient: bool) -> list[Candidate]:
    """The plugins in `plugin_dirs`; if `ambient`, after those that are installed and those in TFKIT_PLUGIN_DIR.

    A later one replaces those of the same name.
    """
    found = _installed() if ambient else []
    if ambient:
        found = _replaced(found, [replace(one, origin=f"{one.origin}, by {PLUGIN_DIR}") for one in _from_environment()])
    return _replaced(found, _in_folders(plugin_dirs))


def _replaced(found: Sequence[Candidate], later: Iterable[Candidate]) -> list[Candidate]:
    before = {canonical(one.name): one for one in found}
    every = []
    for one in later:
        other = before.pop(canonical(one.name), None)
        if other is not None and other.version != one.version:
            place = "installed" if other.origin.startswith(ENTRY_POINT) else other.origin
            one = replace(one, origin=f"{one.origin} (instead of {other.version}, {place})")
        every.append(one)
    return [*before.values(), *every]


def _from_environment() -> list[Candidate]:
    """The plugins in the folders of TFKIT_PLUGIN_DIR, which must be absolute: no other folder's code may run."""
    folders = [Path(one).expanduser() for one in os.environ.get(PLUGIN_DIR, "").split(os.pathsep) if one.strip()]
    relative = [one for one in folders if not one.is_absolute()]
    if relative:
        help = "a relative path would run code of whichever folder you are in"
        raise SpecError(*(Diagnostic(f"{PLUGIN_DIR} takes absolute paths, not `{one}`", help=help) for one in relative))
    return _in_folders(folders, notes=(f"named in {PLUGIN_DIR}",))


def lying_in(folders: Iterable[Path]) -> dict[str, Path]:
    """The paths of the readable plugins in these folders, by canonical name. No plugin code runs."""
    found: dict[str, Path] = {}
    for folder in folders:
        with suppress(OSError):
            for path in _plugin_paths(folder):
                found.setdefault(canonical(_candidate(path).name), path)
    return found


def canonical(name: str) -> str:
    """The name as package indexes compare it: in lower case, with `-` for any run of `-`, `_` and `.`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _installed() -> list[Candidate]:
    points: dict[str, list[EntryPoint]] = {}
    every = entry_points()
    for point in sorted((one for group in GROUPS for one in every.select(group=group)), key=lambda point: point.name):
        points.setdefault(point.dist.name if point.dist else point.name, []).append(point)
    found = []
    for name, group in sorted(points.items()):
        version = group[0].dist.version if group[0].dist else ""
        found.append(_distribution(name, version, f"{ENTRY_POINT}{_others(name, version)}", group, None))
    return found


def _others(name: str, version: str) -> str:
    """The other versions of a distribution that are installed: Python takes the first in its path."""
    others = {one.version: one.locate_file("") for one in distributions(name=name) if one.version != version}
    return "".join(f" (instead of {other}, in {place})" for other, place in others.items())


def _distribution(
    name: str, version: str, origin: str, points: Sequence[EntryPoint], folders: tuple[str, ...] | None
) -> Candidate:
    load = partial(load_points, [point for point in points if point.group == GROUP], folders)
    return Candidate(name, version, origin, load, f"{name} {version}".rstrip(), tuple(points), folders)


def _in_folders(plugin_dirs: Iterable[Path], notes: tuple[str, ...] = ()) -> list[Candidate]:
    """Each plugin once, however many folders lead to it; raises `SpecError` for folders that hold none."""
    found: dict[Path, Candidate] = {}
    problems = []
    for folder in map(Path, plugin_dirs):
        try:
            paths = _plugin_paths(folder)
        except OSError as error:
            problems.append(Diagnostic(f"plugin folder `{folder}` cannot be read: {error.strerror}", notes=notes))
            continue
        found |= {path.resolve(): _candidate(path) for path in paths if path.resolve() not in found}
        if not paths:
            what = "holds no plugin" if os.path.exists(folder) else "does not exist"
            problems.append(Diagnostic(f"plugin folder `{folder}` {what}", notes=notes, help=f"it may hold {LAYOUTS}"))
    if problems:
        raise SpecError(*problems)
    return list(found.values())


def _plugin_paths(path: Path) -> list[Path]:
    """`path` itself if it is a plugin, otherwise the plugins directly below it."""
    if _is_plugin(path):
        return [path]
    inside = sorted(path.iterdir()) if os.path.isdir(path) else []
    candidates = [one for one in inside if not LEFT_ALONE.fullmatch(one.name)]
    return [one for one in candidates if _is_plugin(one) or (one / "pyproject.toml").is_file()]


def _is_plugin(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".py"
    return (path / "__init__.py").is_file() or _names_modules(path / "pyproject.toml")


def _names_modules(file: Path) -> bool:
    """True if the project is a plugin, or cannot be read: loading it will then show why not."""
    try:
        return file.is_file() and bool(_project(file)[1])
    except (OSError, ValueError, AttributeError):
        return True


def _project(file: Path) -> tuple[dict[str, Any], list[EntryPoint]]:
    """The project in a pyproject.toml, and its entry points in our groups."""
    project: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    groups = project.get("entry-points", {})
    points = [(key, value, group) for group in GROUPS for key, value in groups.get(group, {}).items()]
    for key, value, group in points:
        if not isinstance(value, str):
            raise ValueError(f'write [project.entry-points."{group}.{key}"], with quotes')
    return project, [EntryPoint(*point) for point in points]


def _candidate(path: Path) -> Candidate:
    file, own = path / "pyproject.toml", path.resolve()
    if path.is_file() or (not _names_modules(file) and (path / "__init__.py").is_file()):
        name = own.stem if path.is_file() else own.name
        return Candidate(name, "", str(path), partial(load_file, path), str(path))
    try:
        project, points = _project(file)
        if not points:
            raise ValueError(f"it has no [project.entry-points.{GROUP}]")
    except (OSError, ValueError, AttributeError) as error:
        return Candidate(own.name, "", str(path), partial(_refuse, file, error), str(path))
    name, version = str(project.get("name", own.name)), str(project.get("version", ""))
    folders = tuple(str(one.resolve()) for one in (path / "src", path) if one.is_dir())
    return _distribution(name, version, str(path), points, folders)


def _refuse(file: Path, error: Exception) -> Sequence[object]:
    raise ImportError(f"{file}: {error}") from error


def _switched_off(names: Sequence[str], disabled: Collection[str]) -> set[str]:
    """The canonical names of the plugins to leave out; those in `TFKIT_DISABLE` need not exist."""
    known = {canonical(name) for name in names}
    unknown = [name for name in disabled if canonical(name) not in known]
    if unknown:
        raise SpecError(*(_unknown_plugin(name, names) for name in unknown))
    return {canonical(name) for name in [*disabled, *os.environ.get(DISABLE, "").split(",")]} & known


def _unknown_plugin(name: str, names: Sequence[str]) -> Diagnostic:
    known = f"plugins: {listing(names)}" if names else "no plugin was found"
    message = f"cannot switch off plugin `{name}`: there is no plugin of that name"
    return Diagnostic(message, notes=(known,), help=similar("a plugin", name, names))

"""The sources of plugins: installed distributions, and the folders of `--plugin-dir` and TFKIT_PLUGIN_DIR.

No plugin code runs during the search. Each plugin becomes a `Candidate`, whose `load` imports it later; an error in one
plugin (a broken pyproject.toml, too) shows then, and affects only that plugin.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from tfkit.errors import Diagnostic, SpecError
from tfkit.plugin.registry import OWN_NAME

GROUP = "tfkit"
PLUGIN_DIR = "TFKIT_PLUGIN_DIR"
ENTRY_POINT = "entry point"
LAYOUTS = "a *.py file, a package, or a project whose pyproject.toml has [project.entry-points.tfkit]"
LEFT_ALONE = re.compile(r"[._].*|test_.*|tests|conftest\.py|setup\.py")


@dataclass(frozen=True)
class Candidate:
    """A plugin that was found: `load` imports it and returns the objects, usually modules, that have hooks."""

    name: str
    version: str
    origin: str
    load: Callable[[], Sequence[object]]
    label: str
    """Its name in messages: `tfkit-additive 0.1.0`, or the path of a plugin that is not a distribution."""


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
        if other is not None and other.origin == ENTRY_POINT and other.version != one.version:
            one = replace(one, origin=f"{one.origin} (instead of the installed {other.version})")
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
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        points.setdefault(point.dist.name if point.dist else point.name, []).append(point)
    found = []
    for name, group in sorted(points.items()):
        version = group[0].dist.version if group[0].dist else ""
        load = partial(_load_points, group)
        found.append(Candidate(name, version, ENTRY_POINT, load, f"{name} {version}".rstrip()))
    return found


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
    """The project in a pyproject.toml, and its entry points in our group."""
    project: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    points = project.get("entry-points", {}).get(GROUP, {})
    return project, [EntryPoint(key, value, GROUP) for key, value in points.items()]


def _candidate(path: Path) -> Candidate:
    file, own = path / "pyproject.toml", path.resolve()
    if path.is_file() or (not _names_modules(file) and (path / "__init__.py").is_file()):
        name = own.stem if path.is_file() else own.name
        return Candidate(name, "", str(path), partial(_load_file, path), str(path))
    try:
        project, points = _project(file)
        if not points:
            raise ValueError(f"it has no [project.entry-points.{GROUP}]")
    except (OSError, ValueError, AttributeError) as error:
        return Candidate(own.name, "", str(path), partial(_refuse, file, error), str(path))
    name, version = str(project.get("name", own.name)), str(project.get("version", ""))
    load = partial(_load_project, path, points)
    return Candidate(name, version, str(path), load, f"{name} {version}".rstrip())


def _refuse(file: Path, error: Exception) -> Sequence[object]:
    raise ImportError(f"{file}: {error}") from error


def _load_points(points: Iterable[EntryPoint]) -> Sequence[object]:
    return [point.load() for point in points]


def _load_project(root: Path, points: Sequence[EntryPoint]) -> Sequence[object]:
    """Import a project's modules under their own names, from its own folder, installed or not."""
    importlib.invalidate_caches()
    folders = [str(one.resolve()) for one in (root / "src", root) if one.is_dir()]
    with _search(folders):
        for point in points:
            _check_place(point.module.partition(".")[0], folders)
        return _load_points(points)


def _check_place(name: str, folders: Sequence[str]) -> None:
    """Raise an error unless the package is in one of the folders and no other of that name has been imported."""
    spec = PathFinder.find_spec(name, folders)
    if spec is None:
        raise ModuleNotFoundError(f"no module `{name}` in {' or '.join(reversed(folders))}", name=name)
    other = _place(getattr(sys.modules.get(name), "__spec__", None))
    if name in sys.modules and other != _place(spec):
        raise ImportError(f"another module `{name}` has been imported, from {other}", name=name)


def _place(spec: Any) -> str:
    """The file of a module; the folder of a package without `__init__.py`."""
    place = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
    return str(Path(place).resolve()) if place else "elsewhere"


@contextmanager
def _search(folders: Sequence[str]) -> Iterator[None]:
    """Search for modules in `folders` first; afterwards `sys.path` is as before, whatever was done to it."""
    before = sys.path[:]
    sys.path[:0] = folders
    try:
        yield
    finally:
        sys.path[:] = before


def _load_file(path: Path) -> Sequence[object]:
    """Import a file or a package under a name of its own; as with any import, once per process."""
    file = (path / "__init__.py" if path.is_dir() else path).resolve()
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"{OWN_NAME}{re.sub(r'[^0-9A-Za-z]', '_', path.stem)}_{digest}"
    if name in sys.modules:
        return [sys.modules[name]]
    inside = [str(file.parent)] if path.is_dir() else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=inside)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        _execute(module, path)
    except BaseException:
        for part in [part for part in sys.modules if part == name or part.startswith(f"{name}.")]:
            del sys.modules[part]
        raise
    return [module]


def _execute(module: ModuleType, path: Path) -> None:
    importlib.invalidate_caches()
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    before = sys.path[:]
    try:
        module.__spec__.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in _siblings(path):
            error.add_note("a plugin of several files is a package and writes `from .module import name`")
        raise
    finally:
        sys.path[:] = before


def _siblings(path: Path) -> set[str]:
    folder = path if path.is_dir() else path.parent
    return {path.stem} | {one.stem for one in folder.iterdir()}

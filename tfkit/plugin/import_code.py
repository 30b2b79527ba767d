"""Import of plugin code: an entry point, a project in a plugin folder, a single file, or a package."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE_PREFIX = "tfkit_plugin_"
"""Prefix of the module names of plugins that are a file or a folder, and therefore have no module name."""


def load_points(points: Iterable[EntryPoint], folders: Sequence[str] | None) -> Sequence[object]:
    """Import the objects of entry points: from `folders` only, installed or not, or by the path of Python."""
    if folders is None:
        return [point.load() for point in points]
    importlib.invalidate_caches()
    with _search_folders(folders):
        for point in points:
            _check_location(point.module.partition(".")[0], folders)
        return [point.load() for point in points]


def load_file(path: Path) -> Sequence[object]:
    """Import a file or a package under a unique name; as with any import, once per process."""
    file = (path / "__init__.py" if path.is_dir() else path).resolve()
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"{MODULE_PREFIX}{re.sub(r'[^0-9A-Za-z]', '_', path.stem)}_{digest}"
    if name in sys.modules:
        return [sys.modules[name]]
    inside = [str(file.parent)] if path.is_dir() else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=inside)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        _execute_module(module, path)
    except BaseException:
        for part in [part for part in sys.modules if part == name or part.startswith(f"{name}.")]:
            del sys.modules[part]
        raise
    return [module]


def source_of(module: str, folders: Sequence[str] | None) -> Path:
    """Find the file of a module without running any code; raise ModuleNotFoundError if there is none."""
    top, *parts = module.split(".")
    spec = _module_spec(top, folders)
    if not parts and spec.origin:
        return Path(spec.origin)
    for base in (Path(location, *parts) for location in spec.submodule_search_locations or ()):
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file
    raise ModuleNotFoundError(f"there is no module `{module}`", name=module)


def folder_of(package: str, folders: Sequence[str] | None) -> Path:
    """Find the folder of a package by its dotted name, without running code; raise ModuleNotFoundError if missing."""
    top, *parts = package.split(".")
    spec = _module_spec(top, folders)
    for path in (Path(location, *parts) for location in spec.submodule_search_locations or ()):
        if path.is_dir():
            return path
    raise ModuleNotFoundError(f"there is no folder `{'/'.join([top, *parts])}`", name=package)


def _module_spec(name: str, folders: Sequence[str] | None) -> ModuleSpec:
    """Find a top-level module in `folders`, or by the path of Python."""
    if folders is not None or name not in sys.modules:
        importlib.invalidate_caches()
    spec = importlib.util.find_spec(name) if folders is None else PathFinder.find_spec(name, folders)
    if spec is None:
        location = f" in {' or '.join(reversed(folders))}" if folders else ""
        raise ModuleNotFoundError(f"no module `{name}`{location}", name=name)
    return spec


def _check_location(name: str, folders: Sequence[str]) -> None:
    """Raise an error unless the package is in one of the folders and no other of that name has been imported."""
    spec = _module_spec(name, folders)
    other = _module_location(getattr(sys.modules.get(name), "__spec__", None))
    if name in sys.modules and other != _module_location(spec):
        raise ImportError(f"another module `{name}` has been imported, from {other}", name=name)


def _module_location(spec: Any) -> str:
    """Return the file of a module, or the folder of a package without `__init__.py`."""
    location = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
    return str(Path(location).resolve()) if location else "elsewhere"


@contextmanager
def _search_folders(folders: Sequence[str]) -> Iterator[None]:
    """Search for modules in `folders` first. On exit, restore `sys.path`, even if the imported code changed it."""
    before = sys.path[:]
    sys.path[:0] = folders
    try:
        yield
    finally:
        sys.path[:] = before


def _execute_module(module: ModuleType, path: Path) -> None:
    importlib.invalidate_caches()
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    try:
        with _search_folders(()):
            module.__spec__.loader.exec_module(module)
    except ModuleNotFoundError as error:
        siblings = {path.stem, *(file.stem for file in (path if path.is_dir() else path.parent).iterdir())}
        if error.name and error.name.partition(".")[0] in siblings:
            error.add_note("a plugin of several files is a package and writes `from .module import name`")
        raise

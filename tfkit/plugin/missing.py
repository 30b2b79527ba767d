"""Plugins that a spec requires but that are not loaded: their location, and how to load them.

A spec is data. It names the plugins that it needs, and the user decides whether their code may run: the functions here
only search for them. `elsewhere.toml` lists the specs of tfkit's plugins, so an error about an unknown spec can name
its plugin.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from tfkit.errors import quoted
from tfkit.plugin.discover import DISABLE, LEFT_ALONE, PLUGIN_DIR, lying_in, normalized_name, switched_off

if TYPE_CHECKING:
    from tfkit.plugin.manager import Plugins


@cache
def specs_elsewhere() -> Mapping[str, Mapping[str, str]]:
    """Return, for each of tfkit's plugins, the names of its specs with the model types of their families, or `""`."""
    return tomllib.loads(Path(__file__).with_name("elsewhere.toml").read_text(encoding="utf-8"))


def plugin_of(name: str) -> str | None:
    """Return the name of the tfkit plugin that contains a spec; None if none does."""
    return next((plugin for plugin, models in specs_elsewhere().items() if name in models), None)


def plugin_of_family(model_type: str) -> str | None:
    """Return the name of the tfkit plugin that contains the family of a model type; None if none does."""
    return next((plugin for plugin, models in specs_elsewhere().items() if model_type in models.values()), None)


def how_to_get(name: str, plugins: Plugins, folders: Iterable[Path]) -> str:
    """Explain why the plugin `name` is not among `plugins` and how to load it, in one line of help.

    `folders` are the folders to search for it.
    """
    canonical_name = normalized_name(name)
    broken = next((plugin for plugin in plugins.broken if normalized_name(plugin.name) == canonical_name), None)
    if broken is not None:
        return f"it is installed and fails: {broken.cause}{f' ({broken.where})' if broken.where else ''}"
    return where_it_is(name, folders)


def where_it_is(name: str, folders: Iterable[Path]) -> str:
    """Explain how to load the plugin `name`, which is not loaded. `folders` are the folders to search for it."""
    if normalized_name(name) in switched_off():
        return f"it is switched off by {DISABLE}"
    if _is_installed(name):
        return "it is installed, but omitted by `--no-plugins` (`entry_points=False`)"
    path = lying_in(folders).get(normalized_name(name))
    if path is None:
        step = "get its folder (tfkit's own plugins are in `plugins/` of its repository)"
        return f"{step}, then `pip install FOLDER`, or allow it there: `--plugin-dir FOLDER`, or {PLUGIN_DIR}"
    allow = how_to_allow(path)
    return f"`pip install {_path_argument(path)}`, or {allow}" if (path / "pyproject.toml").is_file() else allow


def where_kind_is(kind: str, folders: Iterable[Path], loaded: Iterable[str] = ()) -> str | None:
    """Explain how to load the plugin in these folders whose code has a config of a kind; None if there is none.

    The code is searched, not run. The plugins with the names in `loaded` and tfkit itself are omitted.
    """
    declaration = re.compile(rf"""Literal\[["']{re.escape(kind)}["']\]""")
    omitted = {"tfkit", *map(normalized_name, loaded)}
    for path in (path for name, path in lying_in(folders).items() if name not in omitted):
        for file in [path] if path.is_file() else _files_in(path, ".py"):
            with suppress(OSError, UnicodeDecodeError):
                if declaration.search(file.read_text(encoding="utf-8")):
                    return f"{quoted(str(path))} defines it; {how_to_allow(path)}"
    return None


def where_spec_is(name: str, folders: Iterable[Path]) -> str | None:
    """Explain how to load the plugin in these folders that contains a spec; None if there is none."""
    for path in lying_in(folders).values():
        if path.is_dir() and any(file.stem == name for file in _files_in(path, ".yaml")):
            return f"{quoted(str(path))} contains it; {how_to_allow(path)}"
    return None


def _files_in(folder: Path, suffix: str) -> Iterator[Path]:
    """Yield the files below a folder, except in folders that are not part of a plugin, such as `.venv`."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not LEFT_ALONE.fullmatch(name))
        yield from (Path(parent, name) for name in sorted(files) if name.endswith(suffix))


def how_to_allow(path: Path) -> str:
    """Explain how to load the plugin at a path."""
    return f"allow it in place: `--plugin-dir {_path_argument(path)}`, or {PLUGIN_DIR}"


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except (PackageNotFoundError, ValueError):
        return False
    return True


def _path_argument(path: Path) -> str:
    """Format a path for a command line, with a separator: pip reads a bare word as the name of a distribution."""
    return str(path) if path.is_absolute() or str(path).startswith(".") else f"./{path}"

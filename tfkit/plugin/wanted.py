"""Advice about a plugin that a spec names and that is not loaded: where it is, and how to load it.

A spec is data. It names the plugins that it needs, and its reader decides if their code may run: the functions here
only look for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tfkit.plugin.discover import DISABLE, PLUGIN_DIR, canonical, lying_in
from tfkit.plugin.manager import Plugins


def how_to_get(name: str, plugins: Plugins, folders: Iterable[Path]) -> str:
    """Explain why the plugin `name` is not among `plugins` and how to load it, in one line of help.

    `folders` are the places to look for it.
    """
    canonical_name = canonical(name)
    broken = next((plugin for plugin in plugins.broken if canonical(plugin.name) == canonical_name), None)
    if broken is not None:
        return f"it is installed and fails: {broken.cause}{f' ({broken.where})' if broken.where else ''}"
    return where_it_is(name, folders, plugins.disabled)


def where_it_is(name: str, folders: Iterable[Path], disabled: Iterable[str] = ()) -> str:
    """Explain how to load the plugin `name`, which is not loaded.

    `folders` are the places to look for it, `disabled` the names of plugins that were switched off.
    """
    if canonical(name) in map(canonical, disabled):
        return f"it is switched off: by `--disable {name}`, or by {DISABLE}"
    if _is_installed(name):
        return "it is installed, and left out by `--no-plugins` (`entry_points=False`)"
    path = lying_in(folders).get(canonical(name))
    if path is None:
        place = "get its folder (tfkit's own plugins are in `plugins/` of its repository)"
        return f"{place}, then `pip install FOLDER`, or allow it there: `--plugin-dir FOLDER`, or {PLUGIN_DIR}"
    allow = f"allow it in place: `--plugin-dir {_shown(path)}`, or {PLUGIN_DIR}"
    return f"`pip install {_shown(path)}`, or {allow}" if (path / "pyproject.toml").is_file() else allow


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except (PackageNotFoundError, ValueError):
        return False
    return True


def _shown(path: Path) -> str:
    """Return a path as the command line takes it: pip reads a bare word as the name of a distribution."""
    return str(path) if path.is_absolute() or str(path).startswith(".") else f"./{path}"

"""Plugins that tests write as text, and helpers to load them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from tfkit.plugin.manager import Plugins, load_plugins

HEAD = """
from typing import Literal
from tfkit.component import FFNConfig
from tfkit.plugin.hookspecs import hookimpl
"""
HOOK = "write `@tfkit.hookimpl def tfkit_register(register)`"


def config(kind: str) -> str:
    return f"""
class {kind.title()}Config(FFNConfig):
    kind: Literal["{kind}"] = "{kind}"
    def build(self, make): ...
"""


def plugin(*kinds: str, hook: str = "tfkit_register", body: str = "") -> str:
    """The text of a plugin module that registers FFNs of these kinds, then runs `body` in its hook."""
    calls = "".join(f"    register({kind.title()}Config)\n" for kind in kinds)
    classes = "".join(map(config, kinds))
    return f"{HEAD}{classes}\n@hookimpl\ndef {hook}(register):\n{calls}    {body or 'pass'}\n"


def load(*folders: str | Path, entry_points: bool = False, disabled: Sequence[str] = ()) -> Plugins:
    before = sys.path[:]
    try:
        with patch.dict(os.environ, {"TFKIT_DISABLE": ",".join(disabled)} if disabled else {}):
            return load_plugins(plugin_dirs=[Path(folder) for folder in folders], entry_points=entry_points)
    finally:
        assert sys.path == before


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def project(folder: str, name: str, modules: str, version: str = "0.1.0") -> None:
    entry = f'[project.entry-points.tfkit]\nplugin = "{modules}"\n'
    write(f"{folder}/pyproject.toml", f'[project]\nname = "{name}"\nversion = "{version}"\n{entry}')


def origins(plugins: Plugins) -> dict[str, str]:
    return {plugin.name: plugin.origin for plugin in plugins.loaded}


def causes(plugins: Plugins) -> dict[str, str]:
    return {plugin.name: plugin.cause for plugin in plugins.broken}


def kinds(plugins: Plugins) -> list[str]:
    return list(plugins.registry.kinds("ffn"))
